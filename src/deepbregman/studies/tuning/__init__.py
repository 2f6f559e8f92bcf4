"""Bayesian search over fields of a recipe, judged on held-out training images only."""
