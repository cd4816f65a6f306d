"""What a loaded model must prove: that the cache reproduces it, and which passes keep its bits."""
