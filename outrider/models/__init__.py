"""Models on our own cache: loading, probing, attention, fast paths."""
