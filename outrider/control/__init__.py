"""How many draft tokens to ask for, per row and step."""

from outrider.control.fixed import FixedLength

__all__ = ["FixedLength"]
