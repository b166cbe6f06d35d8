"""Whole runs: from a configuration to its parts, its stages and its result."""
