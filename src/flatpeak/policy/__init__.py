"""The model: loading, attention, token log-probabilities, decoding."""
