"""`outrider serve`: an OpenAI-compatible HTTP server around one engine per model."""
