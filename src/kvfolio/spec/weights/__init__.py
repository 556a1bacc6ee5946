"""Counts the weights of a model from its config: how many there are, and the bytes they take as published.

Imports run one way: ``config/families.py`` asks for the count here; of ``config/`` this room takes ``heads`` and
``class_defaults`` alone, which read single fields, so that a size has one list of names.
"""
