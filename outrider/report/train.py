"""The report of a training run: what it brought, in a sentence; learning curves; measured before and
after; how it was made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from outrider.errors import counted
from outrider.report.document import (
    NOTHING,
    Bar,
    Block,
    Bullets,
    Cells,
    Chart,
    Document,
    Heading,
    Paragraph,
    table,
)
from outrider.report.render import origin
from outrider.report.text import amount, figure, number
from outrider.train.train_result import CurvePoint, HeldOutResult, TrainResult

T = TypeVar("T")
SHOWN = 16  # points of a curve


def document(result: TrainResult) -> Document:
    """Everything in it is in the result."""
    blocks: list[Block] = [
        _verdict(result),
        *_curves(result),
        *_measured(result),
        Heading("How it was made"),
    ]
    blocks.append(Bullets(list(_circumstances(result))))
    subtitle = origin(result, f"{result.seconds / 60:.1f} minutes of training steps")
    return Document(f"Training: {result.recipe} for {result.target}", subtitle, tuple(blocks))


def _verdict(result: TrainResult) -> Paragraph:
    first = result.curve[0]
    best = max(result.curve, key=lambda point: point.tau)
    text = (
        f"expected tau on held-out texts: {first.tau:.2f} before, {best.tau:.2f} at its best "
        f"(step {best.step} of {result.steps}), which is the drafter that was kept"
    )
    if best.step == first.step:
        return Paragraph(f"Training did not help: {text}.", "bad")
    last = result.curve[-1]
    over = (
        f" It fell to {last.tau:.2f} afterwards: fewer epochs, or more texts."
        if last.tau < 0.98 * best.tau
        else ""
    )
    return Paragraph(f"{text[0].upper()}{text[1:]}.{over}", "good")


def _measured(result: TrainResult) -> Iterator[Block]:
    """Measurements before training stand above those after it."""
    if not result.measured:
        return
    order = sorted(
        result.measured, key=lambda row: (row.temperature, row.task, row.label != "before")
    )
    groups: dict[str, list[HeldOutResult]] = {}
    for row in order:
        groups.setdefault(f"{row.task}, temperature {row.temperature:g}", []).append(row)
    yield table(groups, MEASURED, f"Measured on held-out prompts with {order[-1].configuration}")


MEASURED: Cells[HeldOutResult] = {
    "drafter": lambda row: row.label,
    "tokens per pass": lambda row: number(row.tau),
    "accepted": lambda row: number(row.alpha),
    "drafted per step": lambda row: number(row.drafted / max(row.steps, 1)),
    "kept by position": lambda row: _positions(row),
    "prompts": lambda row: str(row.num_prompts),
}
CURVE: Cells[CurvePoint] = {
    "optimizer step": lambda point: str(point.step),
    "held-out loss": lambda point: figure(point.loss),
    "kept by position": lambda point: " ".join(map(number, point.survival)) or NOTHING,
}


def _positions(row: HeldOutResult) -> str:
    return " ".join(number(count / max(row.steps, 1)) for count in row.accepted_per_position)


def _curves(result: TrainResult) -> Iterator[Block]:
    points = _spread(result.curve)
    if len(points) > 1:
        best = max(points, key=lambda point: point.tau)
        bars = [
            Bar(str(point.step), number(point.tau), point.tau, tone="good", is_best=point is best)
            for point in points
        ]
        title = "Expected tokens per pass on held-out texts, by optimizer step"
        yield Chart(title, "optimizer step", "tokens per pass", {"": bars}, baseline=1.0)
    losses = [Bar(str(loss.step), figure(loss.loss), loss.loss) for loss in _spread(result.losses)]
    if len(losses) > 1:
        yield Chart("Training loss, by optimizer step", "optimizer step", "loss", {"": losses})
    if len(points) > 1:
        loss = result.settings.get("loss", "loss")
        yield table(points, CURVE, f"Held-out texts while training ({loss})")


def _spread(points: Sequence[T]) -> list[T]:
    """Evenly spread ones of many, the last among them."""
    step = -(-len(points) // SHOWN)
    last = len(points) - 1
    return [point for at, point in enumerate(points) if at % step == 0 or at == last]


def _circumstances(result: TrainResult) -> Iterator[str]:
    yield (
        f"{counted(result.num_train, 'text')} to train on ({result.num_train_tokens} response "
        f"tokens), {result.num_held_out} held out, by prompt"
    )
    yield f"{result.num_trained_parameters} trained parameters; the drafter takes {amount(result.drafter_bytes)} on disk"
    yield "training: " + ", ".join(f"{name} {value}" for name, value in result.config.items())
    if result.settings:
        yield f"{result.recipe}: " + ", ".join(
            f"{name} {value}" for name, value in result.settings.items() if value != ""
        )
    yield "responses: " + ", ".join(
        f"{name} {value}" for name, value in result.responses.items() if value is not None
    )
    yield from (f"calibration: {name} {value:.4g}" for name, value in result.calibration.items())
    yield from result.notes
    if result.command:
        yield f"command: {result.command}"
