"""Models made from a loaded model's own weights: fewer layers, or fewer bits."""
