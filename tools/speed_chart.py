"""The picture in README: its table of speeds as SVG, made of the stored result.

It brings its own background and follows the reader's light or dark setting, so it can be read on
either page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "real-model-2026-11-27.json"
PICTURE = ROOT / "docs" / "images" / "speed.svg"
KINDS = {  # name in the result -> in README
    "mt": "MT-bench chat",
    "gsm8k": "GSM8K",
    "summarization": "summarization",
    "rag": "retrieval",
    "translation": "translation",
    "qa": "question answering",
}
ENGINES = {  # heading -> settings, of which the fastest counts
    "llama.cpp": ("llamacpp: plain",),
    "OpenVINO GenAI, best setting": ("openvino: plain", "openvino: lookup k=5 ngram=3"),
    "Outrider, plain": ("outrider: none",),
    "Outrider, suffix": ("outrider: suffix k=8",),
}
TITLE = "Tokens per second after the first, SmolLM2-135M-Instruct Q4_1, two CPU cores"
WIDTH = 720
LEFT = 160  # where bars begin
BAR = 15
GAP = 16  # between kinds of prompts
TOP = 76
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 }
.card { fill: #ffffff; stroke: #d0d7de }
.engine0 { fill: #b6bcc4 } .engine1 { fill: #8b939e } .engine2 { fill: #7db2ec } .engine3 { fill: #0b6bcb }
.number3 { font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .card { fill: #0d1117; stroke: #30363d }
  .engine0 { fill: #4b535d } .engine1 { fill: #767f8a } .engine2 { fill: #2f6cab } .engine3 { fill: #5aa9f5 }
}
"""


def speeds(result: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Tokens per second by kind of prompt and engine, as README's table has them."""
    return {
        name: {
            engine: round(
                max(
                    median(run["tokens_per_s"] for run in runs[setting])
                    for setting in settings
                    if setting in runs
                )
            )
            for engine, settings in ENGINES.items()
        }
        for name, runs in ((KINDS[kind], result["drafting"]["Q4_1"][kind]) for kind in KINDS)
    }


def svg(table: Mapping[str, Mapping[str, int]]) -> str:
    """The picture of such a table; equal tables give equal pictures."""
    height = TOP + len(table) * (len(ENGINES) * BAR + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(TITLE)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="title" x="16" y="28">{escape(TITLE)}</text>',
        *_legend(),
        *_bars(table),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _legend() -> Iterator[str]:
    x = 16
    for number, engine in enumerate(ENGINES):
        yield f'<rect class="engine{number}" x="{x}" y="43" width="12" height="12" rx="2"/>'
        yield f'<text x="{x + 18}" y="54">{escape(engine)}</text>'
        x += 46 + 7 * len(engine)


def _bars(table: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    fastest = max(speed for row in table.values() for speed in row.values())
    y = TOP
    for kind, row in table.items():
        middle = y + len(row) * BAR // 2 + 4
        yield f'<text x="{LEFT - 12}" y="{middle}" text-anchor="end">{escape(kind)}</text>'
        for number, speed in enumerate(row.values()):
            length = round((WIDTH - LEFT - 60) * speed / fastest)
            yield (
                f'<rect class="engine{number}" x="{LEFT}" y="{y}" width="{length}" '
                f'height="{BAR - 2}"/>'
            )
            yield (
                f'<text class="number{number}" x="{LEFT + length + 6}" y="{y + 11}">{speed}</text>'
            )
            y += BAR
        y += GAP


def draw() -> str:
    """The picture of the stored result."""
    return svg(speeds(json.loads(RESULT.read_text(encoding="utf-8"))))
