"""Measuring, comparing and reporting, for every benchmark."""
