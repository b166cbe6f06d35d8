"""Kernels for matrix products and decoding attention: they take tensors instead of models, and need torch only."""
