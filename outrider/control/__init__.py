"""How many draft tokens to ask for, per row and step."""

from outrider.control.by_rows import LengthByRows
from outrider.control.fixed import FixedLength
from outrider.control.goodput import Goodput

__all__ = ["FixedLength", "Goodput", "LengthByRows"]
