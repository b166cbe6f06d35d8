"""Prompts in, groups of completions out."""
