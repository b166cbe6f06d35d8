"""Checkpoints for others: exported, and on the Hub with a model card."""
