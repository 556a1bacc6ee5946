"""The networks, one family a file, in plain torch over a view (the cache) and ops (the arithmetic)."""
