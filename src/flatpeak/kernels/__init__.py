"""Kernels for matrix products and decoding attention that take tensors instead of models and need only torch."""
