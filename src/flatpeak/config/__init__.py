"""The whole configuration of a run: its schema, and how a recipe is read, merged and checked."""
