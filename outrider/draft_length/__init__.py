"""How many draft tokens to ask for, per row and step."""

from outrider.draft_length.auto import AutoLength
from outrider.draft_length.fixed import FixedLength
from outrider.draft_length.goodput import Goodput
from outrider.draft_length.table import LengthByRows

__all__ = ["AutoLength", "FixedLength", "Goodput", "LengthByRows"]
