"""Trained heads that come with Outrider, each in a folder of its own whose name `--draft` takes."""

from __future__ import annotations

from pathlib import Path

HEADS = Path(__file__).with_name("shipped_heads")


def shipped_head(name: str) -> Path | None:
    """The folder of the head of this name; None: none of that name comes along."""
    folder = HEADS / name
    is_head = folder.parent == HEADS and (folder / "config.json").is_file()
    return folder if is_head else None
