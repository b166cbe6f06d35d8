"""Processes that run reward functions under limits of time and memory."""
