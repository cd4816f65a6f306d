"""Continuous batching around `Decoder.step`: requests in, updates out."""
