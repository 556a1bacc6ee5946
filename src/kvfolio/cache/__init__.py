"""Who holds which block: integers only. No tensors, no clock, no I/O."""
