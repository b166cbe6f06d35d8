"""Gradient regularization for trainers of other libraries."""
