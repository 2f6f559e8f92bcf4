"""Pretraining: assembly, loop, optimisers, checkpoints, diagnostics."""
