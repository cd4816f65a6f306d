"""Models whose layers keep more than keys and values, on transformers' own cache."""
