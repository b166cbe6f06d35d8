"""The ground floor: helpers that every package may import."""
