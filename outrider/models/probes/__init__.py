"""The checks of a loaded model: that the cache reproduces it, and which passes keep its bits."""
