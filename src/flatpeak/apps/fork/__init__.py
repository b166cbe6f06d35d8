"""Runs that go on from a checkpoint of another one under changed settings."""
