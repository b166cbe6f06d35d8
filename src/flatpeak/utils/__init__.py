"""Helpers at the bottom of the package, which every other package may import."""
