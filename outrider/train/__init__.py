"""Trained drafters: from a target and prompts to a folder that `--drafter KIND --draft FOLDER`
loads (docs/train.md)."""
