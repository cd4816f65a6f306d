"""The command to type after a report: the models and the settings of the run, ready to paste."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from outrider.lab.result import Result
from outrider.report.document import Block, CodeBlock, Paragraph

MODEL = ("--draft", "--device", "--threads", "--model-options")
DRAFTING = ("--settings", "--drafter", "--num-draft-tokens", "--verifier")
PROMPTS = ("--prompts", "--reading")
NOT_TUNED = ("lossy", "prefill", "draft_endpoint")  # of --model-options: 'tune' has none of these


def command(
    result: Result, verb: str, target: str, more: Sequence[str] = (), also: Sequence[str] = ()
) -> str:
    """`outrider VERB TARGET`, with the model's options as they were typed for this result. `also`:
    further options to take over; `more`: what comes after them."""
    words = ["outrider", verb, target]
    for name, value in _typed(result.command, (*MODEL, *also)):
        if name == "--model-options" and verb == "serve":
            words += _spread(value)
        elif name == "--model-options" and verb == "tune":
            options = shlex.split(value)
            tuned = [each for each in options if each.partition("=")[0] not in NOT_TUNED]
            words += [name, shlex.join(tuned)] if tuned else []
        else:
            words += [name, value]
    return shlex.join([*words, *more])


def step(words: str, text: str) -> list[Block]:
    """The next step in words, and its command."""
    return [Paragraph(words), CodeBlock(text, "bash")]


def _typed(text: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """These options of a command line, with their values."""
    try:
        words = iter(shlex.split(text))
    except ValueError:  # written by a version that did not quote
        return
    for word in words:
        name, equals, value = word.partition("=")
        if name in names:
            yield name, value if equals else next(words, "")


def _spread(options: str) -> Iterator[str]:
    """'dtype=float32 trust_remote_code=true' as `serve` takes it."""
    for option in shlex.split(options):
        name, _, value = option.partition("=")
        flag = name.replace("_", "-")
        if value in ("true", "false"):
            yield f"--{'' if value == 'true' else 'no-'}{flag}"
        else:
            yield from (f"--{flag}", value)
