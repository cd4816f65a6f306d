"""A document with every block in it, as a person would meet it, and the same with hostile texts."""

from __future__ import annotations

from outrider.report.document import (
    Bar,
    Bullets,
    Chart,
    CodeBlock,
    Column,
    Document,
    Heading,
    MarkedTokens,
    Paragraph,
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


def chart() -> Chart:
    """Every tone; an interval, none, and one without an end."""
    bars = [
        Bar(CONFIGURATIONS[0], "1.74x [1.68, 1.83]", 1.74, 1.68, 1.83, "good", is_best=True),
        Bar(CONFIGURATIONS[1], "1.21x [1.15, 9.30]", 1.21, 1.15, 9.3, "caution"),
        Bar("plain decoding", "1.00x", 1.0),
        Bar(CONFIGURATIONS[2], "0.93x [0.87, 0.97]", 0.93, 0.87, 0.97, "bad"),
    ]
    return Chart("Speedup over plain decoding", "setting", "speedup", {"": bars}, baseline=1.0)


def grouped_chart() -> Chart:
    groups = {"prose": [Bar("1", "0.91", 0.91)], "code": [Bar("1", "0.95", 0.95), Bar("2", "0", 0)]}
    return Chart("Accepted, by position", "position", "share", groups, scale=1.0)


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
    """Every block, and every sort of chart."""
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
            chart(),
            Heading("Where time goes"),
            Bullets(["draft 22 %", "target 71 %", "verify 4 %"]),
            Heading("By position", level=3),
            grouped_chart(),
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
    bars = [Bar(words, words, 1.0), Bar(words, words, 2.0, 1.5, 2.5, "good", is_best=True)]
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
            Chart(words, words, words, {words: bars, "other": bars}, baseline=1.0),
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
