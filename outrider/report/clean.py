"""Text that others wrote (models, users, files) made harmless before a writer escapes it for its own format.

Every writer sends every text through here: control characters, halves of surrogate pairs and non-characters, which no
terminal, XML or UTF-8 file takes, and marks that turn the reading direction of what follows become U+FFFD.
"""

from __future__ import annotations

import re

from outrider.report.text import printable

_SURROGATES = "\ud800-\udfff"
_NON_CHARACTERS = "\ufdd0-\ufdef" + "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
_TURNS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # right-to-left letters turn themselves and need none of these
_HARMFUL = re.compile(f"[{_SURROGATES}{_NON_CHARACTERS}{_TURNS}\u2028\u2029]")


def clean(text: str) -> str:
    """Line breaks and tabs stay."""
    return _HARMFUL.sub("\ufffd", printable(text.replace("\r\n", "\n")))


def one_line(text: str) -> str:
    """`clean`, with every run of white space a single space: for titles and cells."""
    return " ".join(clean(text).split())
