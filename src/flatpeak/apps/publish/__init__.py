"""A checkpoint as others take it: exported, and on the Hub with a model card."""
