"""Counts the weights of a model from its config: how many there are, and the bytes they take as published."""
