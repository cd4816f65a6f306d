"""The report of a training run: what it brought, in a sentence; measured before and after; learning
curves; how it was made."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.errors import counted
from outrider.report.document import (
    Block,
    Bullets,
    Document,
    Fact,
    Heading,
    Paragraph,
    curves,
    table,
)
from outrider.report.render import origin
from outrider.report.text import amount, number
from outrider.train.train_result import HeldOutResult, TrainResult


def document(result: TrainResult) -> Document:
    """Everything in it is in the result."""
    blocks: list[Block] = [
        _verdict(result),
        *_measured(result),
        *_curves(result),
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
    facts: list[Fact[HeldOutResult]] = [
        Fact("temperature", lambda one: f"{one.temperature:g}", align="left"),
        Fact("task", lambda one: one.task, align="left"),
        Fact(
            "drafter", lambda one: one.label, "before: the untrained one, or that of --init", "left"
        ),
        Fact("prompts", lambda one: str(one.num_prompts)),
        Fact("tau", lambda one: number(one.tau), "emitted tokens / target passes"),
        Fact("alpha", lambda one: number(one.alpha), "accepted / tested draft tokens"),
        Fact(
            "drafted",
            lambda one: number(one.drafted / max(one.steps, 1)),
            "draft tokens submitted per target pass",
        ),
        Fact(
            "accepted at 1, 2, ...",
            _positions,
            "share of the steps whose j-th draft token was accepted",
            "left",
        ),
    ]
    order = sorted(
        result.measured, key=lambda one: (one.temperature, one.task, one.label != "before")
    )
    yield table(order, facts, f"Measured on held-out prompts with {order[-1].configuration}")


def _positions(result: HeldOutResult) -> str:
    return " ".join(f"{count / max(result.steps, 1):.2f}" for count in result.accepted_per_position)


def _curves(result: TrainResult) -> Iterator[Block]:
    points = result.curve
    steps = "optimizer steps"
    if len(points) > 1:
        yield curves(
            "Expected tau",
            steps,
            "tokens per target pass",
            {"held out": {point.step: point.tau for point in points}},
        )
        survival = {
            f"first {j + 1}": {
                point.step: point.survival[j] for point in points if j < len(point.survival)
            }
            for j in range(max(len(point.survival) for point in points))
        }
        yield curves(
            "Chance that the first draft tokens are all accepted", steps, "chance", survival
        )
        loss = str(result.settings.get("loss", "loss"))
        yield curves(
            "Held-out loss", steps, loss, {"held out": {point.step: point.loss for point in points}}
        )
    if len(result.losses) > 1:
        yield curves(
            "Training loss",
            steps,
            "loss",
            {"training": {loss.step: loss.loss for loss in result.losses}},
        )


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
