"""Checks of the machine and the installation: what works, what is missing, and what mends it."""
