"""The SGLang that the plug-in was written for."""

from __future__ import annotations

TESTED = "0.5.19"
OTHERWISE = f"Outrider knows the speculative algorithms of SGLang {TESTED}, and here"
