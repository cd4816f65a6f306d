"""Lines and JSON for people and programs, from finished results; and text that others wrote, made
harmless.

Every ratio is printed with its formula, because the field uses the same word for different ones
(docs/glossary.md).
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outrider.errors import counted
from outrider.stats import DecodeStats, PartStats

if TYPE_CHECKING:
    from outrider.lab.result import Interval

PLAINER = "outrider-plainer"  # how streams handle signs that they cannot encode
ASCII = dict(zip("✅❌⚠✓✗▸•─‹›⁺▌█·ταγµ×−", "+x!+x>--<>+|#-tagux-", strict=True)) | {"\ufe0f": ""}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SURROGATES = "\ud800-\udfff"
_NON_CHARACTERS = "\ufdd0-\ufdef" + "".join(
    chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF)
)
# right-to-left letters turn themselves and need none of these
_TURNS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_HARMFUL = re.compile(f"[{_SURROGATES}{_NON_CHARACTERS}{_TURNS}\u2028\u2029]")


def printable(text: str) -> str:
    """Text a terminal only displays: control characters, which a model can write, are replaced."""
    return _CONTROL.sub("\ufffd", text)


def _plainer(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return ASCII.get(error.object[error.start], "?"), error.start + 1


codecs.register_error(PLAINER, _plainer)


def number(value: float | Interval | None, digits: int = 2, unit: str = "") -> str:
    """A rounded number, or a dash where there is none."""
    if value is None:
        return "-"
    return f"{value if isinstance(value, int | float) else value.value:.{digits}f}{unit}"


def interval(bounds: Interval | None, unit: str = "") -> str:
    """A number with its interval, or a dash where there is none."""
    return "-" if bounds is None else bounds.words(unit)


def figure(value: float | None) -> str:
    """For a measured value: three significant digits, whole from 100 on: 0.0123, 1.50, 48.0, 1234.
    A dash where there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.3g}" if not 1e-4 <= abs(value) < 1e7 else f"{value:.{_decimals(value)}f}"


def with_interval(value: float | None, low: float | None, high: float | None) -> str:
    """'1.52 [1.48, 1.60]', all to the same decimal; or the value alone."""
    if value is None or (low is None and high is None):
        return figure(value)
    size = max(abs(end) for end in (value, low, high) if end is not None)
    if not 1e-4 <= size < 1e7:
        return f"{figure(value)} [{figure(low)}, {figure(high)}]"
    digits = _decimals(abs(value) if abs(value) > size / 100 else size)
    written = ("-" if end is None else f"{end:.{digits}f}" for end in (low, high))
    return f"{value:.{digits}f} [{', '.join(written)}]"


def _decimals(value: float) -> int:
    return max(0, 2 - math.floor(math.log10(abs(value))))


def amount(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"


def stats_line(
    stats: DecodeStats,
    finish_reason: str | None = None,
    *,
    lossless: bool = True,
    prompt_share: float = 1.0,
    seeded: str | None = None,
) -> str:
    """One generation, or the sum over several, in one line: counts, time to first token, speed
    after it, drafts. `seeded`: what the text depends on besides its prompt, where it has a seed."""
    parts = [
        *([] if lossless else ["LOSSY"]),
        *([] if prompt_share == 1 else [f"{prompt_share:.0%} of the prompt read"]),
        f"{counted(stats.emitted, 'token')} in {number(stats.ttft_s + stats.decode_s)} s",
        *_speed_parts(stats),
    ]
    if stats.drafted:
        parts += [
            f"τ {number(stats.tau)} tokens per target pass",
            f"α {number(stats.alpha)} (accepted {stats.accepted} of {stats.tested} tested)",
        ]
    if stats.experts_per_pass is not None:
        parts.append(f"{number(stats.experts_per_pass)} experts of a layer per pass")
    if stats.parts:
        parts.append(f"accepted of drafted: {by_part(stats.parts)}")
    if seeded:
        parts.append(seeded)
    if finish_reason:
        parts.append(
            {"length": "ended by the length limit", "abort": "stopped by you"}.get(
                finish_reason, finish_reason
            )
        )
    return " · ".join(parts)


def by_part(parts: Mapping[str, PartStats]) -> str:
    """'eagle3 80 of 200, ngram 12 of 30': accepted of drafted tokens."""
    return ", ".join(
        f"{part} {counts.accepted} of {counts.drafted}" for part, counts in parts.items()
    )


def _speed_parts(stats: DecodeStats) -> list[str]:
    """Time to first token, and the speed after it where more than one step emitted something."""
    if stats.mean_ttft_s is None:
        return []
    average = " on average" if stats.answers > 1 else ""
    first = f"first token after {number(stats.mean_ttft_s)} s{average}"
    if stats.decode_tokens_per_s is None or stats.tpot_s is None:
        return [first]
    return [
        first,
        f"then {number(stats.decode_tokens_per_s, 0)} tokens/s ({number(1000 * stats.tpot_s, 1)} "
        "ms per token)",
    ]


def to_json(value: dict[str, Any]) -> str:
    """One line of strict JSON: infinities and NaN, which it lacks, become null; unknown objects
    their str."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def clean(text: str) -> str:
    """Line breaks and tabs stay."""
    return _HARMFUL.sub("\ufffd", printable(text.replace("\r\n", "\n")))


def one_line(text: str) -> str:
    """`clean`, with every run of white space a single space: for titles and cells."""
    return " ".join(clean(text).split())
