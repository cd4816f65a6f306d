"""Trees of draft tokens: their shapes, how they grow, and how they become a `Draft`."""
