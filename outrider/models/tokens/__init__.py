"""Tokens and text: what tokens decode to, and whether two tokenizers agree."""
