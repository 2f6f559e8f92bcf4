"""Evaluate a run: its encoder frozen, fine-tuned on few labels, or on another dataset."""
