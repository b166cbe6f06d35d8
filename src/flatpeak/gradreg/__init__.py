"""Gradient regularization: perturb, recompute, restore, combine, and the guard that it really happened."""
