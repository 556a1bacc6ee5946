"""What computing tokens again and moving bytes would take on this machine, from plain numbers that never change.

Knows nothing of how they were measured: engine/machine.py. Twins given equal numbers decide alike.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """Seconds for work that the ledger and the scheduler may choose between."""

    flops_per_s: float  # of large products
    copy_bytes_per_s: float  # between the cache and the host pool
    flops_per_token: float  # of one token, attention left out
    flops_per_read: float  # of one query reading one token, all layers together

    def compute_s(self, start: int, stop: int) -> float:
        """Computing the tokens at [start, stop), each of which reads all before it."""
        reads = (stop * (stop + 1) - start * (start + 1)) / 2
        return ((stop - start) * self.flops_per_token + reads * self.flops_per_read) / self.flops_per_s

    def move_s(self, num_bytes: int) -> float:
        """Copying bytes one way."""
        return num_bytes / self.copy_bytes_per_s
