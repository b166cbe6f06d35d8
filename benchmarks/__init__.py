"""Measured comparisons of flatpeak with other software; RESULTS.md has the results."""
