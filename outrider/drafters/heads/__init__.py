"""Drafters that run a small head on the target's hidden states."""
