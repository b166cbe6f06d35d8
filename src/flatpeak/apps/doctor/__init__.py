"""Checks of the machine and the installation: what works, what is missing, and the fix."""
