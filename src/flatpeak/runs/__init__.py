"""Run directory, checkpoints, metrics, rollout log."""
