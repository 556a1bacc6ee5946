"""Who runs next: requests in, steps out. The same code under the engine's clock and the simulator's."""
