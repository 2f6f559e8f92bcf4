"""The encoder of a run, written for other programs, and read back."""
