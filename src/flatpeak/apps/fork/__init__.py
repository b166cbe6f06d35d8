"""Runs that continue from a checkpoint of another run, with changed settings."""
