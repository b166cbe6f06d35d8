"""Measurement, comparison and reports for all benchmarks."""
