"""A page of runs and studies: one HTML file, its figures and its tables."""
