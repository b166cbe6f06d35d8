"""Benchmarks on CPU cores, each with its own command."""
