"""How many draft tokens to ask for, per row and step."""

from outrider.control.fixed import FixedLength
from outrider.control.goodput import Goodput

__all__ = ["FixedLength", "Goodput"]
