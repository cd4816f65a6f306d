"""Trained heads: one file for each architecture, one next to it for how it lies on disk. Loaded,
drafted with and exported."""
