"""Completions in, scores out."""
