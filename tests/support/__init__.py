"""Helpers that several tests share, and scripts that check the tree."""
