"""Benchmarks on CPU cores, each a command of its own."""
