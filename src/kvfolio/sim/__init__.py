"""Asking what would happen: the engine's own scheduler and ledger under a virtual clock."""
