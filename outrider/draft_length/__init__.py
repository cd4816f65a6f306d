"""How many draft tokens to ask for, per row and step."""

from outrider.draft_length.auto import AutoLength
from outrider.draft_length.fixed import FixedLength
from outrider.draft_length.goodput import Goodput

__all__ = ["AutoLength", "FixedLength", "Goodput"]
