"""From a name to a loaded model: files, configs, memory, and what cannot be loaded."""
