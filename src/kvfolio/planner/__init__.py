"""What a cache would cost: arithmetic on numbers, no tensors, instant."""
