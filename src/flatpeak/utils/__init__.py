"""The ground floor: helpers that every part may import."""
