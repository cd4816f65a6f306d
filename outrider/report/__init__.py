"""Renderers: marked text, one-line summaries and tables. They take finished results, compute nothing."""
