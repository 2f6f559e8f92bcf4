"""Verbs that have not moved to commands/ yet."""
