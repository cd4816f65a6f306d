"""A check before a server is ready: do its drafters draft, keep the texts, and save time?

Built-in prompts are answered greedily by the engine itself, plain and with the full draft of every
drafter. It warns and never refuses, and chooses no settings (`outrider tune` does that).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

from outrider.build import REMOTE
from outrider.draft_length.length import DraftLength
from outrider.drafters import DRAFTERS
from outrider.drafters.requirements import Requirements
from outrider.engine.request import Request, Speculation, Update
from outrider.errors import CapabilityError, OutriderError
from outrider.messages import encode_conversation
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats

if TYPE_CHECKING:
    from outrider.serve.serves import Serves

log = logging.getLogger("outrider.serve")

TEXTS = (
    "The history of the city begins with a small harbour at the mouth of the river, where",
    "Question: A shop sells pencils in boxes of 12. How many pencils are in 7 boxes?\nAnswer:",
    'def fibonacci(n: int) -> int:\n    """The n-th Fibonacci number."""\n',
    f"A list:{2 * ' apple, pear, plum, fig, lemon, cherry. The same list:'} apple,",
)
CHAT = [{"role": "user", "content": "Explain in two sentences why the sky is blue."}]
PLAIN = "plain"
BUDGET_S = 20.0  # no further prompt is begun after this; two are always answered
PATIENCE_S = 300.0  # for one answer


@dataclass(frozen=True)
class Finding:
    """Something an operator should know."""

    code: str  # the same in every release: alerts are written on it
    message: str
    severity: Literal["warning", "note"] = "warning"
    drafter: str | None = None


@dataclass(frozen=True)
class SelfTest:
    """`numbers`: of plain decoding and of each drafter."""

    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    measured_at: str = field(
        default_factory=lambda: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    )
    remembered: bool = False  # by an earlier start, whose numbers these are

    def write_log(self, model_name: str) -> None:
        """A line for each finding, and one with the speeds."""
        subject = f"self-test of {model_name}"
        for finding in self.findings:
            level = logging.WARNING if finding.severity == "warning" else logging.INFO
            log.log(level, "%s: %s", subject, finding.message, extra={"finding": finding.code})
        if self.remembered:
            subject += f": remembered from {self.measured_at}, not measured now"
        speeds = "; ".join(
            f"{name} {run['tokens_per_s']:.0f} tokens/s, tau {run['tau']:.2f}"
            for name, run in self.numbers.items()
        )
        log.info("%s: %s", subject, speeds or "no prompt was answered")


@dataclass
class _Run:
    """The answers of one way to decode."""

    stats: DecodeStats = field(default_factory=DecodeStats)
    texts: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def ask(self, engine: Serves, prompt: list[int], drafter: str, max_tokens: int) -> None:
        """Add one answer. Raises OutriderError or Empty where there is none."""
        updates: SimpleQueue[Update] = SimpleQueue()
        request = Request(
            id=f"self-test-{id(updates):x}",
            prompt=prompt,
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            speculation=_speculation(engine, drafter),
            timeout_s=PATIENCE_S,
        )
        engine.submit(request, updates.put)
        parts: list[Update] = []
        while not parts or parts[-1].finish is None:
            parts.append(updates.get(timeout=PATIENCE_S + 30))
        answer = Update.joined(parts)
        finish = answer.finish
        assert finish is not None
        if finish.reason not in ("stop", "length"):
            raise finish.error or CapabilityError(f"it ended as '{finish.reason}'")
        waited = finish.queued_s + finish.prefill_s
        self.seconds.append(max(finish.stats.ttft_s + finish.stats.decode_s - waited, 1e-9))
        self.stats = self.stats.merge(finish.stats)
        self.texts.append(list(answer.token_ids))

    def numbers(self, plain: _Run) -> dict[str, Any]:
        """Plain JSON."""
        ratios = [base / mine for base, mine in zip(plain.seconds, self.seconds, strict=False)]
        return {
            "prompts": len(self.texts),
            "same_texts": sum(a == b for a, b in zip(self.texts, plain.texts, strict=False)),
            "drafted": self.stats.drafted,
            "accepted": self.stats.accepted,
            "alpha": self.stats.alpha,
            "tau": self.stats.tau,
            "tokens_per_s": self.stats.emitted / sum(self.seconds),
            "speedup": sum(plain.seconds[: len(ratios)]) / sum(self.seconds),
            "speedup_range": [min(ratios), max(ratios)],
        }


def self_test(engine: Serves, *, max_tokens: int = 32) -> SelfTest:
    """Try a started engine that has no other requests; whatever fails is a finding."""
    began = time.perf_counter()
    findings: list[Finding] = []
    prompts = [list(engine.tokenizer(text)["input_ids"]) for text in TEXTS]
    runs = {name: _Run() for name in (PLAIN, *engine.drafters) if name != "none"}
    try:
        if template := getattr(engine.tokenizer, "chat_template", None):
            chat = encode_conversation(engine.tokenizer, CHAT, template, add_generation_prompt=True)
            prompts.insert(1, chat)
    except OutriderError as error:
        findings.append(Finding("chat-template", f"chat requests will be refused: {error}"))
    try:
        prompts = [prompt[-max(1, engine.context - max_tokens - 1) :] for prompt in prompts]
        for name in runs:  # the first request of a kind pays for what is made only once
            _Run().ask(engine, prompts[0], name, min(4, max_tokens))
        for number, prompt in enumerate(prompts):
            if number < 2 or time.perf_counter() - began < BUDGET_S:
                for name, run in runs.items():
                    run.ask(engine, prompt, name, max_tokens)
    except (OutriderError, Empty) as error:
        message = f"a built-in prompt could not be answered: {str(error) or 'the engine hangs'}"
        findings.append(Finding("probe-failed", message))
    numbers = {name: run.numbers(runs[PLAIN]) for name, run in runs.items() if run.texts}
    for name in filter(numbers.__contains__, engine.drafters):
        findings += _judged(engine, name, runs[name].stats, numbers[name])
    return SelfTest(findings, numbers)


def _speculation(engine: Serves, drafter: str) -> Speculation:
    """The longest draft that the engine takes from this drafter."""
    if drafter == PLAIN:
        return Speculation(mode="off")
    is_first = drafter == engine.config["drafter"]
    length = engine.config["num_draft_tokens"] if is_first else None
    nodes = DraftLength.parse(length, _required(engine, drafter).num_draft_tokens).max_nodes
    return Speculation(mode="fixed", drafter=drafter, max_draft_tokens=nodes)


def _required(engine: Serves, name: str) -> Requirements:
    drafter = DRAFTERS.load(name)
    options = engine.config.get("drafter_options") if name == engine.config["drafter"] else None
    return drafter.requirements(drafter.Settings(**(options or {})))


def _judged(
    engine: Serves, name: str, stats: DecodeStats, run: dict[str, Any]
) -> Iterator[Finding]:
    """Findings from the numbers of one drafter."""
    needs = _required(engine, name)
    # a model should be good for something; look-ups depend on the text
    severity: Literal["warning", "note"] = (
        "warning" if needs.draft or needs.head or name == REMOTE else "note"
    )
    about = f"drafter '{name}', {run['prompts']} prompts:"
    if not stats.drafted:
        yield Finding("draft-unused", f"{about} it drafted nothing", severity, name)
        return
    if stats.tested >= 10 and stats.accepted < 0.1 * stats.tested:
        message = f"{about} {stats.accepted} of {stats.tested} tested draft tokens were accepted"
        yield Finding("no-acceptance", message, severity, name)
    if run["speedup"] < 0.95:
        low, high = run["speedup_range"]
        message = f"{about} {run['speedup']:.2f} times plain speed, {low:.2f}x to {high:.2f}x"
        adapts = str(engine.config.get("num_draft_tokens")).startswith("auto")
        yield Finding("slower-than-plain", message, "note" if adapts else "warning", name)
    if (differ := run["prompts"] - run["same_texts"]) and engine.lossless:
        exact = engine.config.get("exact", True)
        why = "which should not be" if exact else "as rounding may do here (config.exact is false)"
        message = f"{about} {differ} greedy texts differ from plain ones, {why}"
        yield Finding("texts-differ", message, "warning" if exact else "note", name)
