"""A check before a server is ready: does drafting work here, and is it faster than plain decoding?

A handful of built-in prompts, one of them through the chat template, is answered greedily twice by
the engine itself: plain, and with the full draft length. The log, /ready and a metric then report
what an operator would otherwise find out weeks later: nothing is accepted, a draft is loaded but
drafts nothing, texts may grow longer than the draft was trained for, drafting is slower than plain
decoding, or the texts differ.

It warns and never refuses: a slow draft is a bad idea, not an error. The numbers are of a few
hundred tokens and one request at a time: enough to see that something is broken, not to choose
settings (`outrider tune` does that).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from outrider.build import REMOTE
from outrider.draft_length.length import DraftLength
from outrider.drafters import DRAFTERS
from outrider.engine.request import Finish, Listener, Request, Speculation, Update
from outrider.errors import CapabilityError, CheckpointError, OutriderError
from outrider.models.loading.load import load_config
from outrider.models.source import resolve
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats
from outrider.templates import conversation_text
from outrider.wellformed import load_object

log = logging.getLogger("outrider.serve")

TEXTS = (
    "The history of the city begins with a small harbour at the mouth of the river, where",
    "Question: A shop sells pencils in boxes of 12. How many pencils are in 7 boxes?\nAnswer:",
    'def fibonacci(n: int) -> int:\n    """The n-th Fibonacci number."""\n',
    "List: apple, pear, plum, fig, lemon, cherry.\nThe same list: apple, pear, plum, fig, lemon, cherry.\nThe same list: apple,",
)
CHAT = [{"role": "user", "content": "Explain in two sentences why the sky is blue."}]
MAX_TOKENS = 32
WARMUP_TOKENS = 4
BUDGET_S = 20.0  # no further probe is begun after this; two are always made
MIN_PROBES = 2
PATIENCE_S = 300.0  # for one probe
NEAR_ZERO = 0.1  # alpha below which drafting is pointless
MIN_TESTED = 10  # draft tokens, to say so
SLOWER = 0.95  # of the plain speed


@dataclass(frozen=True)
class Finding:
    """Something an operator should know."""

    code: str  # the same in every release: alerts are written on it
    message: str  # what was seen, and what to do
    severity: Literal["warning", "note"] = "warning"
    drafter: str | None = None


@dataclass(frozen=True)
class SelfTest:
    """`numbers`: probes, seconds, plain and per drafter."""

    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    measured_at: str = field(
        default_factory=lambda: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    )
    is_remembered: bool = False  # by an earlier start, whose numbers these are

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "warning"]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, for /ready."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "numbers": self.numbers,
            "measured_at": self.measured_at,
            "remembered": self.is_remembered,
        }

    def write_log(self, model_name: str) -> None:
        """One line per finding, and one with the speeds."""
        for finding in self.findings:
            level = logging.WARNING if finding.severity == "warning" else logging.INFO
            log.log(
                level,
                "self-test of %s: %s",
                model_name,
                finding.message,
                extra={"finding": finding.code},
            )
        when = (
            f"remembered from {self.measured_at}, not measured now: " if self.is_remembered else ""
        )
        log.info(
            "self-test of %s: %s%s",
            model_name,
            when,
            "; ".join(self._speeds()) or "no prompt was answered",
        )

    def _speeds(self) -> Iterator[str]:
        """What each way to decode came to, in words."""
        runs = {"plain": self.numbers.get("plain", {}), **self.numbers.get("drafters", {})}
        for name, run in runs.items():
            if (rate := run.get("tokens_per_s")) is None:
                continue
            gain = (
                ""
                if name == "plain" or not run.get("speedup")
                else f" ({run['speedup']:.2f} times plain)"
            )
            drafts = (
                f", tau {run['tau']:.2f}"
                if run.get("drafted")
                else ", nothing drafted"
                if name != "plain"
                else ""
            )
            yield f"{name} {rate:.0f} tokens/s{gain}{drafts}"


class Tested(Protocol):
    """What is asked of an engine."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def context(self) -> int: ...

    @property
    def drafters(self) -> list[str]: ...

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def lossless(self) -> bool: ...

    def submit(self, request: Request, listener: Listener) -> None: ...


def self_test(
    engine: Tested, *, max_tokens: int = MAX_TOKENS, budget_s: float = BUDGET_S
) -> SelfTest:
    """Runs requests through a started engine that has no others. Raises nothing that a bad draft
    could cause."""
    began = time.perf_counter()
    findings: list[Finding] = []
    prompts = _prompts(engine, max_tokens, findings)
    drafters = [name for name in engine.drafters if name != "none"]
    runs: dict[str | None, _KindTotals] = {
        None: _KindTotals(),
        **{name: _KindTotals() for name in drafters},
    }
    try:
        for name in runs:  # the first request of a kind pays for what is made only once
            _ask(engine, prompts[0], name, min(WARMUP_TOKENS, max_tokens))
        for number, prompt in enumerate(prompts):
            if number >= MIN_PROBES and time.perf_counter() - began > budget_s:
                break
            for name, run in runs.items():
                run.add(_ask(engine, prompt, name, max_tokens))
    except OutriderError as error:
        findings.append(
            Finding("probe-failed", f"a built-in prompt could not be answered: {error}")
        )
    plain = runs.pop(None)
    for name, run in runs.items():
        if name is not None:
            findings += _judge(engine, name, run, plain)
    findings += _too_long(engine)
    numbers = {
        "probes": len(plain.tokens),
        "seconds": round(time.perf_counter() - began, 3),
        "plain": plain.as_dict(plain),
        "drafters": {name: run.as_dict(plain) for name, run in runs.items()},
    }
    return SelfTest(findings, numbers)


class _KindTotals:
    """Answers of one kind, added up."""

    def __init__(self) -> None:
        self.stats = DecodeStats()
        self.tokens: list[list[int]] = []
        self.seconds = 0.0
        self.rates: list[float] = []  # tokens/s of each probe

    def add(self, answer: _Answer) -> None:
        stats = answer.finish.stats
        self.stats = self.stats.merge(stats)
        self.tokens.append(answer.tokens)
        seconds = stats.ttft_s + stats.decode_s - answer.finish.queued_s - answer.finish.prefill_s
        self.seconds += seconds
        self.rates.append(stats.emitted / seconds if seconds > 0 else 0.0)

    @property
    def tokens_per_s(self) -> float | None:
        return self.stats.emitted / self.seconds if self.seconds > 0 else None

    def speedup_range(self, plain: _KindTotals) -> list[float] | None:
        """Lowest and highest speedup of a probe; None where a probe took no time that could be
        measured."""
        pairs = list(zip(self.rates, plain.rates, strict=False))
        if not pairs or not all(mine and base for mine, base in pairs):
            return None
        ratios = [mine / base for mine, base in pairs]
        return [min(ratios), max(ratios)]

    def as_dict(self, plain: _KindTotals) -> dict[str, Any]:
        rate = self.tokens_per_s
        base = plain.tokens_per_s
        return {
            "tokens": self.stats.emitted,
            "tau": self.stats.tau,
            "alpha": self.stats.alpha,
            "drafted": self.stats.drafted,
            "accepted": self.stats.accepted,
            "tokens_per_s": rate,
            "speedup": rate / base if rate and base else None,
            "speedup_range": self.speedup_range(plain),
            "same_texts": sum(a == b for a, b in zip(self.tokens, plain.tokens, strict=False)),
        }


class _Answer:
    """Collects one request's updates in the engine's thread."""

    finish: Finish

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = threading.Event()

    def listen(self, update: Update) -> None:
        self.tokens += update.token_ids
        if update.finish is not None:
            self.finish = update.finish
            self.ended.set()


def _ask(engine: Tested, prompt: list[int], drafter: str | None, max_tokens: int) -> _Answer:
    """One answer; `drafter` None is plain. Raises OutriderError when it does not finish."""
    speculation = Speculation(mode="off")
    if drafter is not None:
        speculation = Speculation(
            mode="fixed", drafter=drafter, max_draft_tokens=_max_nodes(engine, drafter)
        )
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    answer = _Answer()
    request = Request(
        id=f"self-test-{id(answer):x}",
        prompt=prompt,
        params=params,
        speculation=speculation,
        timeout_s=PATIENCE_S,
    )
    engine.submit(request, answer.listen)
    if not answer.ended.wait(PATIENCE_S + 30):
        raise CapabilityError(f"the engine did not answer within {PATIENCE_S + 30:g} s")
    if answer.finish.reason not in ("stop", "length"):
        raise answer.finish.error or CapabilityError(f"it ended as '{answer.finish.reason}'")
    return answer


def _max_nodes(engine: Tested, drafter: str) -> int:
    """The longest draft that the engine takes from this drafter."""
    config = engine.config
    drafter_class = DRAFTERS.load(drafter)
    asked = config["num_draft_tokens"] if drafter == config["drafter"] else None
    return DraftLength.parse(
        asked, drafter_class.requirements(drafter_class.Settings()).num_draft_tokens
    ).max_nodes


def _prompts(engine: Tested, max_tokens: int, findings: list[Finding]) -> list[list[int]]:
    """Token ids that leave room to answer; of a text that is too long, its end."""
    tokenizer = engine.tokenizer
    prompts = [list(tokenizer(text)["input_ids"]) for text in TEXTS]
    if getattr(tokenizer, "chat_template", None):
        try:
            chat = conversation_text(tokenizer, CHAT, add_generation_prompt=True)
            prompts.insert(1, list(tokenizer(chat, add_special_tokens=False)["input_ids"]))
        except Exception as error:  # noqa: BLE001  a template is a program of the model's author
            message = f"the model's chat template fails ({error}): chat requests will be refused"
            findings.append(Finding("chat-template", message))
    room = max(1, engine.context - max_tokens - 1)
    return [prompt[-room:] for prompt in prompts if prompt]


def _judge(engine: Tested, name: str, run: _KindTotals, plain: _KindTotals) -> list[Finding]:
    """Findings from the numbers of one drafter."""
    if not run.tokens:
        return []
    has_model = _has_model(engine, name)
    stats = run.stats
    found = []
    if not stats.drafted:
        message = f"drafter '{name}' drafted nothing on {len(run.tokens)} prompts: {_why_unused(name, has_model=has_model)}"
        return [
            Finding(
                "draft-unused", message, "warning" if has_model or name == REMOTE else "note", name
            )
        ]
    if stats.tested >= MIN_TESTED and (stats.alpha or 0.0) < NEAR_ZERO:
        message = (
            f"drafter '{name}': {stats.accepted} of {stats.tested} tested draft tokens were accepted (alpha {stats.alpha:.3f}); "
            + (
                "was this draft made for this model?"
                if has_model
                else "the probes may not look like your traffic"
            )
        )
        found.append(Finding("no-acceptance", message, "warning" if has_model else "note", name))
    found += _judge_speed(engine, name, run, plain)
    same = run.as_dict(plain)["same_texts"]
    exact = engine.lossless and engine.config.get("exact", True)
    if same < len(run.tokens) and engine.lossless:
        reason = (
            "which should not be" if exact else "as rounding may do here (config.exact is false)"
        )
        message = f"drafter '{name}': {len(run.tokens) - same} of {len(run.tokens)} greedy texts differ from plain ones, {reason}"
        found.append(Finding("texts-differ", message, "warning" if exact else "note", name))
    return found


def _why_unused(name: str, *, has_model: bool) -> str:
    drafter_class = DRAFTERS.load(name)
    if has_model:
        return "its draft is loaded but unused, and only costs memory"
    if drafter_class.requirements(drafter_class.Settings()).prediction:
        return "it drafts for requests that bring a prediction"
    if name == REMOTE:
        return "none came in time from the draft service; the log says why where it does not answer, else its line is too long"
    return "it needs texts that repeat themselves"


def _judge_speed(engine: Tested, name: str, run: _KindTotals, plain: _KindTotals) -> list[Finding]:
    rate = run.tokens_per_s
    base = plain.tokens_per_s
    if not rate or not base or rate >= SLOWER * base:
        return []
    adapts = str(engine.config.get("num_draft_tokens")).startswith("auto")
    advice = (
        "the server will draft less by itself (--num-draft-tokens auto)"
        if adapts
        else "use --num-draft-tokens auto, or settings from `outrider tune`"
    )
    span = run.speedup_range(plain)
    spread = (
        "" if span is None else f", {span[0]:.2f}x to {span[1]:.2f}x over {len(run.rates)} probes"
    )
    message = f"drafter '{name}' makes the probes slower: {rate:.1f} tokens/s against {base:.1f} plain{spread}; {advice}"
    return [Finding("slower-than-plain", message, "note" if adapts else "warning", name)]


def _has_model(engine: Tested, name: str) -> bool:
    """Whether this drafter has weights of its own, which should be good for something."""
    drafter_class = DRAFTERS.load(name)
    required = drafter_class.requirements(drafter_class.Settings())
    if name == engine.config.get("drafter"):
        return engine.config.get("draft") is not None or required.head
    return required.head or required.draft


def _too_long(engine: Tested) -> list[Finding]:
    """Texts that a draft was never trained for."""
    config = engine.config
    found = []
    for folder in filter(None, (config.get("draft"), *_heads(config))):
        longest = trained_context(str(folder))
        if longest is not None and longest < engine.context:
            message = (
                f"requests may have {engine.context} tokens, but the draft was made for {longest}: beyond that it drafts badly "
                f"or not at all; --max-model-len {longest} keeps texts within it"
            )
            found.append(Finding("context-too-long", message, "warning", config.get("drafter")))
    return found


def _heads(config: dict[str, Any]) -> list[str]:
    """Folders of the trained heads that draft, those of a composite's parts among them."""
    drafter_class = DRAFTERS.load(config["drafter"])
    settings = drafter_class.Settings(**(config.get("drafter_options") or {}))
    return [folder for _, folder in drafter_class.requirements(settings).heads]


def trained_context(folder: str) -> int | None:
    """The context length that a draft model or head was made for, from its own config; None where
    it has none."""
    path = Path(folder) / "config.json"
    try:
        config = load_object(path) if path.is_file() else load_config(resolve(folder)).to_dict()
    except (OSError, ValueError, CheckpointError):
        return None  # a head may come without config; a model without one would not have loaded
    length = config.get("max_position_embeddings")
    return length if isinstance(length, int) and length > 0 else None
