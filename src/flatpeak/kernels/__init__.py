"""Hand-written kernels for matrix products and attention; torch only."""
