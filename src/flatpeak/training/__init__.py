"""Batches, objective, optimizer, curriculum, trainer."""
