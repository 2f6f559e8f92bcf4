"""Judging a frozen encoder: features once, then kNN and linear protocols."""
