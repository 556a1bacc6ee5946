"""Reads GGUF files: the header, and the model that it describes for the planner and for the engine."""
