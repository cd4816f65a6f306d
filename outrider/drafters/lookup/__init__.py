"""Drafters that copy from texts: this one, earlier ones, a corpus, or an answer that the caller
expects."""
