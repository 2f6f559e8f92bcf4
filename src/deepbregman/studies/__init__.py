"""Studies and searches: their plans, the engine that runs them, and their results."""
