"""Counts the weights of a model from its config: how many there are, and the bytes they take as published.

Imports run one way: ``config/families.py`` asks for the count here; of ``config/`` this room takes the readers of single
fields alone (``heads``, ``class_defaults``), so that a size has one list of names.
"""
