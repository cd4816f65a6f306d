"""Trained heads: one file for each architecture, one beside it for how it lies on disk. Loaded,
drafted with and exported."""
