"""The model card of an exported drafter, from a bench result: what the hub shows of it, in the form
that cards of speculators have there (front matter with `base_model`, then use, then acceptance and
speed by kind of text).

All numbers are the result's, and the card says on which machine and by which command they were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.errors import ConfigError
from outrider.lab.bench.bench_result import BenchResult
from outrider.lab.result import read_result
from outrider.lazy import huggingface_hub
from outrider.report.bench_tables import Row, condition, rows_of
from outrider.report.document import (
    Bullets,
    Cells,
    CodeBlock,
    Document,
    Heading,
    Paragraph,
    table,
)
from outrider.report.markdown import to_markdown
from outrider.report.text import interval, number

UNKNOWN_LICENCE = "unknown"
README = "README.md"
MAX_README = 1 << 20  # bytes
POSITIONS = 8  # of acceptance

# of the layouts in which another program reads it, that program's way of using it
USES = {
    "speculators": "vllm serve {folder}",
    "vllm": (
        "vllm serve {target} --speculative-config "
        '\'{{"method": "medusa", "model": "{folder}", "num_speculative_tokens": 5}}\''
    ),
}

ACCEPTANCE: Cells[Row] = {
    "kind of text": lambda row: condition(row.cell),
    "setting": lambda row: row.label,
    "tokens per pass": lambda row: number(row.measured.tau),
    "accepted": lambda row: number(row.measured.alpha),
    "accepted by position": lambda row: " ".join(
        number(share)
        for share in (row.measured.acceptance.conditional if row.measured.acceptance else ())[
            :POSITIONS
        ]
    ),
}
SPEED: Cells[Row] = {
    "kind of text": lambda row: condition(row.cell),
    "setting": lambda row: row.label,
    "speedup": lambda row: interval(row.speedup, "x"),
    "tokens/s": lambda row: number(row.measured.tokens_per_s, 1),
    "prompts": lambda row: str(len(row.cell.prompt_ids)),
}


def read_bench(path: Path) -> BenchResult:
    """A result of `bench`. Raises ConfigError for any other file."""
    result = read_result(path)
    if not isinstance(result, BenchResult):
        raise ConfigError(f"{path} is a result of {result.kind}; a card needs one of bench")
    return result


def licence_of(target: str) -> str:
    """The licence in the card of a target that is on this machine; "unknown" where none says it."""
    folder = Path(target).expanduser()
    path: Path | str | None = folder / README
    if not folder.exists():
        try:
            path = huggingface_hub.try_to_load_from_cache(target, README)
        except ValueError:  # no name that the hub could have
            path = None
    if not isinstance(path, Path | str) or not Path(path).is_file():
        return UNKNOWN_LICENCE
    from yaml import YAMLError  # huggingface_hub reads front matter with it

    with Path(path).open("rb") as file:
        text = file.read(MAX_README).decode(errors="replace")
    try:
        licence = huggingface_hub.ModelCard(text, ignore_metadata_errors=True).data.license
    except (YAMLError, ValueError, TypeError, AttributeError):  # no YAML, or no mapping
        return UNKNOWN_LICENCE
    return licence if isinstance(licence, str) else UNKNOWN_LICENCE


def card(
    result: BenchResult, *, kind: str, layout: str, target: str, name: str, licence: str
) -> str:
    """The card's text. `kind`: of the drafter; `name`: of its folder. Raises ConfigError for a
    result in which no such drafter was measured."""
    rows = _rows(result, kind, target)
    head = huggingface_hub.ModelCardData(
        base_model=target,
        license=licence,
        library_name="speculators" if layout == "speculators" else "outrider",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", kind],
    )
    text = to_markdown(_document(result, rows, kind, layout, target, name))
    return f"---\n{head.to_yaml()}\n---\n\n{text}"


def _rows(result: BenchResult, kind: str, target: str) -> list[Row]:
    """Every measurement of the drafter, the fastest setting of a condition first."""
    if result.target is None:
        raise ConfigError("the result is of a server; a card needs a bench of the drafter itself")
    rows = [
        row
        for cell in result.cells
        for row in sorted(rows_of(result, cell), key=_speed, reverse=True)
        if row.info.arguments.get("drafter") == kind and row.measured.acceptance is not None
    ]
    if not rows:
        labels = ", ".join(info.label for info in result.configurations)
        raise ConfigError(
            f"the result has no measurement of a drafter '{kind}', only of {labels}: run "
            f"'outrider bench {target} --draft FOLDER --drafters {kind} --out FILE.json'"
        )
    return rows


def _speed(row: Row) -> float:
    return row.speedup.value if row.speedup is not None else 0.0


def _document(
    result: BenchResult, rows: Sequence[Row], kind: str, layout: str, target: str, name: str
) -> Document:
    assert result.target is not None
    best = max(rows, key=_speed)
    use = [f"outrider serve {target} --draft {name}"]
    if layout in USES:
        use.append(USES[layout].format(folder=name, target=target))
    measured = result.target
    machine = [
        f"processor: {result.machine.get('cpu', 'unknown')}, {measured.threads} threads",
        f"target: {measured.name}, {measured.dtype}, {measured.runtime} runtime",
        f"outrider {result.versions.get('outrider', '?')}, {result.created:%Y-%m-%d}",
        f"prompts: {result.workload.name}",
    ]
    if result.command:
        machine.append(f"command: {result.command}")
    return Document(
        f"{name}: a drafter for {target}",
        "",
        (
            Paragraph(
                f"This is no model to chat with. It drafts tokens that {target} then checks in one "
                f"pass ({kind}, speculative decoding); the text is {target}'s own. Fastest setting "
                f"measured: {best.label}, {interval(best.speedup, 'x')} the speed of plain decoding "
                f"on {condition(best.cell)}."
            ),
            Heading("Use"),
            CodeBlock("\n".join(use), "sh"),
            Heading("Acceptance by position and kind of text"),
            table(rows, ACCEPTANCE),
            Heading("Speed"),
            table(rows, SPEED),
            Paragraph("Where and how this was measured:"),
            Bullets(machine),
        ),
    )
