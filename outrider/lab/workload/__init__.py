"""What is asked of a model: prompts from files, from named collections, from logs, one form for all
of them."""
