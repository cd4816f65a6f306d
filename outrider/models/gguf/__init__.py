"""Checkpoints in one GGUF file (llama.cpp's format): names, header, config, tokenizer, and weights
that stay in their blocks."""
