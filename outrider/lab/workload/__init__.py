"""Prompts from files, from named collections and from logs, in one form."""
