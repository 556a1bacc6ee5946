"""Reads a config.json: the model that it describes for the planner and, of fewer families, for the engine."""
