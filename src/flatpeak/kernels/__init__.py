"""Kernels for matrix products and decoding attention, which know tensors and no models; torch only."""
