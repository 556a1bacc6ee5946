"""Reads a config.json: the model that it describes for the planner and, of fewer families, for the engine.

Imports run one way: ``families`` asks ``weights/`` for the count, and ``weights/`` takes no more than ``heads`` and
``class_defaults`` from here; these two import nothing of ``weights/``.
"""
