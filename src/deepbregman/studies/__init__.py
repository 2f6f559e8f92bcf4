"""Compositions of runs and evaluations: quickstart, and later searches and ablations."""
