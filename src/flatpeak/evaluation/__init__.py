"""Held-out evaluation, comparison of stages, chat."""
