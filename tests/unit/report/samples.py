"""A document with every block in it, as a person would meet it, and the same with hostile texts."""

from __future__ import annotations

import math

from outrider.report.document import (
    Bullets,
    CodeBlock,
    Column,
    Document,
    Heading,
    MarkedTokens,
    Paragraph,
    Plot,
    Series,
    Table,
    Token,
)

HOSTILE = (
    "<script>alert(1)</script>",
    "a|b `c` *d* _e_ [f](http://example.org) ![g](https://example.org/x.png)",
    "\x1b[2J\x1b]0;title\x07bell\x00\x9b31m",
    "שלום עולם مرحبا \u202eevil\u202c",
    "👩‍👩‍👧 é e\u0301 漢字 \ufffe \ud800 \u2028",
    "line\nbreak\r\nand\ttab",
    "```\n# fence\n```",
    "</pre></details></style>{{ 7 * 7 }}{% raw %}",
    "$\\frac{1}{0}$ $unclosed _under",
    "",
)
CONFIGURATIONS = (
    "draft-model k=5",
    "suffix k=auto:12 max_depth=32",
    "draft-model k=8 tree=sequoia verifier=multi-round",
)
LENGTHS = tuple(range(1, 13))


def speedup(configuration: int, length: int) -> float:
    """A curve that rises and falls."""
    return 1 + (0.32 - 0.08 * configuration) * length * math.exp(-length / (6 - configuration))


def lines() -> Plot:
    series = []
    for number, name in enumerate(CONFIGURATIONS):
        ys = [speedup(number, length) for length in LENGTHS]
        series.append(Series(name, ys, [y - 0.05 for y in ys], [y + 0.04 for y in ys]))
    return Plot(
        "Speedup by draft length", "draft length γ", "speedup", LENGTHS, series, baseline=1.0
    )


def gaps() -> Plot:
    """Positions that one series lacks."""
    series = [Series("prose", (0.91, 0.82, 0.61, 0.35)), Series("code", (0.95, None, 0.61, None))]
    return Plot("Kept, by position", "position", "share", (1, 2, 3, 4), series)


def alone() -> Plot:
    accepted = [0.91 ** (i * i / 4 + 1) for i in LENGTHS]
    return Plot("Acceptance by position", "position", "accepted", LENGTHS, [Series("α", accepted)])


def logarithmic() -> Plot:
    lengths = [2**i for i in range(5, 13)]
    series = [
        Series("plain", [88 - 3 * i for i in range(8)]),
        Series("draft-model k=5", [160 - 13 * i for i in range(8)]),
    ]
    return Plot(
        "Tokens per second by context", "tokens of context", "tokens/s", lengths, series, log_x=True
    )


def text(num_repeats: int = 1) -> MarkedTokens:
    hover = "p 0.412 (rank 2)\nq 0.731\nentropy 1.93 bits"
    step = [
        Token(" James", "accepted", hover=hover),
        Token(" picks", "accepted", hover=hover),
        Token(" 18", "accepted", hover=hover),
        Token(" eggs", "correction", rejected=" apples", hover=hover),
        Token(" in", "accepted", hover=hover),
        Token(" the", "accepted", hover=hover),
        Token(" morning", "bonus", hover=hover),
        Token(".\n", "plain", hover=hover),
    ]
    return MarkedTokens(
        "Example: gsm8k-17",
        [*(Token(t, "prompt") for t in ("How", " many", "?\n")), *(step * num_repeats)],
    )


def table() -> Table:
    columns = [
        Column("configuration", align="left"),
        Column("tokens/s"),
        Column("speedup", help="tokens/s over those of plain decoding"),
        Column("τ", help="emitted / steps"),
        Column("α", help="accepted / tested"),
        Column("memory"),
        Column("identical"),
    ]
    rows = [
        ["none", "88.1", "1", "1", "-", "0 B", "-"],
        [CONFIGURATIONS[0], "153.4", "1.74 [1.68, 1.83]", "3.31", "0.81", "412.0 MiB", "yes"],
        [CONFIGURATIONS[1], "106.6", "1.21 [1.15, 1.30]", "1.86", "0.55", "1.5 MiB", "yes"],
        [CONFIGURATIONS[2], "81.9", "0.93 [0.87, 1.02]", "3.92", "0.77", "412.0 MiB", "yes"],
    ]
    return Table(columns, rows, title="All configurations", marked=frozenset({1}))


def everything(num_repeats: int = 8) -> Document:
    """Every block, and every sort of plot."""
    return Document(
        "Benchmark of demo on gsm8k",
        "2026-07-01 · Intel Xeon 6960P, 2 cores · outrider 0.1.0, torch 2.13.0, transformers "
        "5.23.0",
        [
            Paragraph(
                "Speculation pays here: draft-model k=5 is 1.74 times as fast as plain decoding "
                "[1.68, 1.83].",
                "good",
            ),
            Paragraph(
                "One configuration is slower than plain decoding: draft-model k=8 tree=sequoia.",
                "bad",
            ),
            Paragraph("The machine was busy during 2 of 40 runs; those were repeated.", "caution"),
            Paragraph("Forty problems, five repeats each, plain and speculative decoding in turn."),
            Heading("Configurations"),
            table(),
            lines(),
            Heading("Where time goes"),
            Bullets(["draft 22 %", "target 71 %", "verify 4 %"]),
            Heading("By position", level=3),
            alone(),
            gaps(),
            Heading("By context"),
            logarithmic(),
            Heading("Use it"),
            CodeBlock(
                "outrider generate demo --drafter draft-model --num-draft-tokens 5 'How many?'",
                "bash",
            ),
            Heading("An example"),
            text(num_repeats),
        ],
    )


def every_block(words: str) -> Document:
    """`words` wherever a text can stand."""
    column = Column(words, help=words)
    series = [
        Series(words, [1.0, None]),
        Series(words, [2.0, math.inf], [1.5, None], [2.5, math.nan]),
    ]
    return Document(
        words,
        words,
        [
            Heading(words),
            Heading(words, 3),
            Paragraph(words),
            Paragraph(words, "good"),
            Paragraph(words, "bad"),
            Paragraph(words, "caution"),
            Bullets([words, words]),
            CodeBlock(words, "bash"),
            Table(
                [column, Column(words, "left")],
                [[words, words], [words, words]],
                title=words,
                marked=frozenset({1}),
            ),
            Plot(words, words, words, [1, 2], series, baseline=1.0),
            Plot(words, words, words, [1, 2], []),
            MarkedTokens(
                words,
                [
                    Token(words, "prompt"),
                    Token(words, "accepted", hover=words),
                    Token(words, "correction", words, words),
                    Token(words, "bonus"),
                    Token(words, "plain", hover=words),
                ],
            ),
        ],
    )
