"""The report of a training run: what it brought, in a sentence; measured before and after; learning curves; how it was made."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.counted import counted
from outrider.lab.result import Result
from outrider.report.document import Block, Bullets, Column, Document, Heading, Paragraph, Plot, Series, Table
from outrider.report.heading import origin
from outrider.report.text import amount, number
from outrider.train.train_result import HeldOutResult, TrainResult


def document(result: Result) -> Document:
    """Everything in it is in the result."""
    assert isinstance(result, TrainResult)
    blocks: list[Block] = [_verdict(result), *_measured(result), *_curves(result), Heading("How it was made")]
    blocks.append(Bullets(list(_circumstances(result))))
    subtitle = origin(result, f"{result.seconds / 60:.1f} minutes of training steps")
    return Document(f"Training: {result.recipe} for {result.target}", subtitle, tuple(blocks))


def _verdict(result: TrainResult) -> Paragraph:
    first, best = result.curve[0], max(result.curve, key=lambda point: point.tau)
    text = (
        f"expected tau on held-out texts: {first.tau:.2f} before, {best.tau:.2f} at its best "
        f"(step {best.step} of {result.steps}), which is the drafter that was kept"
    )
    if best.step == first.step:
        return Paragraph(f"Training did not help: {text}.", "bad")
    last = result.curve[-1]
    over = f" It fell to {last.tau:.2f} afterwards: fewer epochs, or more texts." if last.tau < 0.98 * best.tau else ""
    return Paragraph(f"{text[0].upper()}{text[1:]}.{over}", "good")


def _measured(result: TrainResult) -> Iterator[Block]:
    if not result.measured:
        return
    before = {(one.temperature, one.task): one for one in result.measured if one.label == "before"}
    after = [one for one in result.measured if one.label == "after"]
    columns = [
        Column("temperature", align="left"), Column("task", align="left"), Column("prompts"),
        Column("tau before", help="tau = emitted tokens / target passes; 'before' is the untrained drafter, or that of --init"),
        Column("tau after"), Column("alpha before", help="alpha = accepted / tested draft tokens"), Column("alpha after"),
        Column("drafted before", help="draft tokens submitted per target pass"), Column("drafted after"),
        Column("accepted at 1, 2, ...", align="left", help="share of the steps whose j-th draft token was accepted, after"),
    ]  # fmt: skip
    rows = []
    for one in after:
        old = before.get((one.temperature, one.task))
        rows.append([
            f"{one.temperature:g}", one.task, str(one.num_prompts), number(None if old is None else old.tau), number(one.tau),
            number(None if old is None else old.alpha), number(one.alpha),
            number(None if old is None else old.drafted / max(old.steps, 1)), number(one.drafted / max(one.steps, 1)),
            _positions(one),
        ])  # fmt: skip
    name = after[0].configuration if after else ""
    yield Table(columns, rows, f"Measured on held-out prompts with {name}")


def _positions(one: HeldOutResult) -> str:
    return " ".join(f"{count / max(one.steps, 1):.2f}" for count in one.accepted_per_position)


def _curves(result: TrainResult) -> Iterator[Block]:
    steps = [float(point.step) for point in result.curve]
    if len(steps) > 1:
        taus = Series("held out", [point.tau for point in result.curve])
        yield Plot("Expected tau", "optimizer steps", "tokens per target pass", steps, [taus])
        depth = max(len(point.survival) for point in result.curve)
        by_position = [
            Series(f"first {j + 1}", [p.survival[j] if j < len(p.survival) else None for p in result.curve]) for j in range(depth)
        ]
        yield Plot("Chance that the first draft tokens are all accepted", "optimizer steps", "chance", steps, by_position)
        yield Plot("Held-out loss", "optimizer steps", str(result.settings.get("loss", "loss")), steps,
                   [Series("held out", [p.loss for p in result.curve])])  # fmt: skip
    if len(result.losses) > 1:
        yield Plot("Training loss", "optimizer steps", "loss", [float(one.step) for one in result.losses],
                   [Series("training", [one.loss for one in result.losses])])  # fmt: skip


def _circumstances(result: TrainResult) -> Iterator[str]:
    yield (
        f"{counted(result.num_train, 'text')} to train on ({result.num_train_tokens} response tokens), "
        f"{result.num_held_out} held out, by prompt"
    )
    yield f"{result.num_trained_parameters} trained parameters; the drafter takes {amount(result.drafter_bytes)} on disk"
    yield "training: " + ", ".join(f"{name} {value}" for name, value in result.config.items())
    if result.settings:
        yield f"{result.recipe}: " + ", ".join(f"{name} {value}" for name, value in result.settings.items() if value != "")
    yield "responses: " + ", ".join(f"{name} {value}" for name, value in result.responses.items() if value is not None)
    yield from (f"calibration: {name} {value:.4g}" for name, value in result.calibration.items())
    yield from result.notes
    if result.command:
        yield f"command: {result.command}"
