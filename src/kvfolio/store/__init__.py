"""Where the bytes live: pools of blocks, and a step's view of them that is handed to a model."""
