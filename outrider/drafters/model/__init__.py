"""Drafters that run a model: a smaller one, or the target's own weights with parts left out or
rounded."""
