"""`certify URL`: is the text of a server with drafts that of the same server without
(docs/certify.md, "A server")?

Greedy texts are asked for alone, and several at once. First the server without drafts must repeat
itself: the same requests come again at the very end, so a server that changes meanwhile is found,
too. Where texts differ, its log-probabilities tell rounding from error. Sampled texts are compared
by how they begin (beginnings.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import numpy as np

from outrider.errors import ConfigError, OutriderError, ServerError, counted
from outrider.lab.certify.beginnings import Stratum, detectable_between, homogeneity
from outrider.lab.certify.certify_result import FALSE_ALARMS, POWER, Status, TextRun
from outrider.lab.certify.ranks import holm
from outrider.lab.certify.server_result import (
    DrawnWith,
    SampledView,
    ServerCause,
    ServerCertifyResult,
    ServerTextDifference,
    ServerTexts,
    ShortTexts,
    TwoSampleTest,
    server_verdict,
)
from outrider.lab.certify.sides import Ask, Side, open_sides
from outrider.lab.progress import QUIET, Progress
from outrider.lab.server.client import Client, RequestOptions, ServerEndpoint, Stream
from outrider.lab.server.logprobs import gap_at
from outrider.lab.workload.types import Workload, WorkloadRequest
from outrider.sampling.params import SamplingParams

NEAR_TIE = 0.25  # nats between two tokens, which passes of other shapes may turn round
CLEAR = 1.0  # nats that no rounding explains
TOP = 5  # log-probabilities asked for: the most that OpenAI's completions give
MAX_EXPLAINED = 10  # texts whose log-probabilities are asked for
SHOWN = 24  # characters of a differing text
SHORT = 8  # tokens of a sampled text
MAX_SHORT = 256  # characters of it that are kept
SAMPLED_PROMPTS = 4  # with fewer of them each has more draws
VIEWS: tuple[SampledView, ...] = ("beginning", "end")
TURNS = 4  # in which the servers draw
WORST_DETECTABLE = 0.25  # a test that would miss even this total variation says nothing
ALONE, AGAIN, AT_ONCE = "alone", "alone, again at the end", "several at once"
GREEDY, SAMPLED = "greedy", "sampled"  # keys of what was drafted


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """How much evidence, and how requests are made. Raises ConfigError for what makes no sense."""

    samples: int = 5000  # of each server
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=128))
    seed: int = 0
    concurrency: int = 8
    api: Literal["auto", "chat", "completions"] = "auto"
    timeout_s: float = 300.0
    settle_s: float = 0.25  # see RequestOptions

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"samples must be at least 1, got {self.samples}")

    @property
    def drawing(self) -> SamplingParams:
        """Options of the sampled section: temperature 1 in place of 0."""
        drawn = self.sampling.drawn() if self.sampling.is_greedy else self.sampling
        return replace(drawn, max_tokens=min(SHORT, drawn.max_tokens or SHORT))

    def ask(self, request: WorkloadRequest, sampling: SamplingParams) -> Ask:
        """One request with these options. Raises ConfigError as `RequestOptions`."""
        options = RequestOptions(
            concurrency=self.concurrency,
            sampling=sampling,
            api=self.api,
            timeout_s=self.timeout_s,
        )
        path, body = options.body(replace(request, max_tokens=None), "")
        return Ask(f"request {request.id}", path, body)


def certify_server(
    endpoints: Mapping[str, ServerEndpoint],
    workload: Workload,
    plan: ServerPlan,
    *,
    progress: Progress = QUIET,
) -> ServerCertifyResult:
    """Every section, then the verdict. `endpoints`: one, or the plain one before the speculative.

    Raises ConfigError for one URL whose server has no known switch, and ServerError where nothing
    was answered.
    """
    for request in workload.requests:
        plan.ask(request, plan.sampling)  # raises before anything is sent
    return asyncio.run(_certify(endpoints, workload, plan, progress))


async def _certify(
    endpoints: Mapping[str, ServerEndpoint],
    workload: Workload,
    plan: ServerPlan,
    progress: Progress,
) -> ServerCertifyResult:
    began = time.perf_counter()
    clients = {
        name: Client(endpoint, timeout_s=plan.timeout_s, reuse=False)
        for name, endpoint in endpoints.items()
    }
    try:
        plain, speculative = await open_sides(endpoints, clients, progress, plan.settle_s)
        texts = Texts(workload.requests, plan, plain, speculative)
        await texts.ask()
        sampled = await sampled_section(workload.requests, plan, plain, speculative)
        await texts.ask_again()
        determinism = texts.determinism()
        greedy = await texts.greedy(determinism)
    finally:
        for client in clients.values():
            await client.http.aclose()
    result = ServerCertifyResult(
        verdict="inconclusive",
        reasons=[],
        plain=plain.asked(),
        speculative=speculative.asked(),
        sampling=asdict(plan.drawing),
        workload=workload.name,
        num_prompts=len(workload.requests),
        max_new_tokens=plan.sampling.required_max_tokens,
        concurrency=plan.concurrency,
        seed=plan.seed,
        determinism=determinism,
        greedy=greedy,
        sampled=sampled,
        notes=list(_notes(workload, plan, plain, speculative)),
        elapsed_s=time.perf_counter() - began,
    )
    verdict, reasons = server_verdict(result)
    return result.model_copy(update={"verdict": verdict, "reasons": reasons})


class Texts:
    """Greedy texts of both servers, and what came of comparing them."""

    def __init__(
        self,
        requests: Sequence[WorkloadRequest],
        plan: ServerPlan,
        plain: Side,
        speculative: Side,
    ) -> None:
        self.plain = plain
        self.speculative = speculative
        greedy = replace(plan.sampling, temperature=0.0)
        self.asks = [plan.ask(request, greedy) for request in requests]
        self.at_once = max(2, plan.concurrency)
        self.answers: dict[tuple[str, str], list[Stream | None]] = {}

    async def ask(self) -> None:
        """Everything but what comes at the end. Raises ServerError where a server answered
        nothing."""
        self.plain.progress.stage("greedy text", 5 * len(self.asks))
        for side in (self.plain, self.speculative):
            for run, at_once in ((ALONE, 1), (AT_ONCE, self.at_once)):
                answers = await side.ask(GREEDY, self.asks, at_once)
                self.answers[side.label, run] = answers
                if not any(answers):
                    raise ServerError(f"{side.label}, {side.failures[0]}")

    async def ask_again(self) -> None:
        """Asks the server without drafts once more, after everything else."""
        self.answers["plain", AGAIN] = await self.plain.ask(GREEDY, self.asks, 1)

    def determinism(self) -> ServerTexts:
        """Whether the server without drafts repeats itself."""
        section = ServerTexts(status="passed", why="")
        section.runs = [self._run("plain", AGAIN), self._run("plain", AT_ONCE)]
        again, together = (run.num_prompts - run.num_identical for run in section.runs)
        total = section.runs[0].num_prompts
        missing = len(self.asks) - total
        if again:
            section.status = "failed"
            section.why = (
                f"{again} of {total} texts of the server without drafts are others when asked for "
                "again: not deterministic, no claim"
            )
        elif missing:
            section.status = "inconclusive"
            section.why = f"{missing} of {len(self.asks)} requests were not answered twice"
        elif together:
            section.status = "not claimed"
            section.why = (
                f"alone the server without drafts repeats all {total} texts, but {together} of "
                f"{section.runs[1].num_prompts} are others when {self.at_once} requests run at once"
            )
        else:
            section.why = (
                f"the server without drafts repeats all {total} texts, alone and with "
                f"{self.at_once} requests at once"
            )
        return section

    async def greedy(self, determinism: ServerTexts) -> ServerTexts:
        """Whether drafts change the texts; `determinism` says what can be claimed."""
        runs = [ALONE, AT_ONCE] if determinism.status == "passed" else [ALONE]
        section = ServerTexts(status="passed", why="")
        for run in runs:
            section.runs.append(self._run("speculative", run))
            section.differences += await self._differences(run)
        section.status, section.why = self._judge(section, determinism)
        return section

    def _pairs(self, label: str, run: str) -> Iterator[tuple[int, Stream, Stream]]:
        """(prompt, the plain server's answer alone, this one) where both came."""
        found = zip(self.answers["plain", ALONE], self.answers[label, run], strict=True)
        for prompt, (expected, other) in enumerate(found):
            if expected is not None and other is not None:
                yield prompt, expected, other

    def _run(self, label: str, run: str) -> TextRun:
        pairs = list(self._pairs(label, run))
        return TextRun(
            name=f"{label}, {run}",
            num_identical=sum(one.text == other.text for _, one, other in pairs),
            num_prompts=len(pairs),
            num_tokens=sum(other.num_tokens or 0 for _, _, other in pairs),
        )

    async def _differences(self, run: str) -> list[ServerTextDifference]:
        differing = [
            (prompt, one, other)
            for prompt, one, other in self._pairs("speculative", run)
            if one.text != other.text
        ][:MAX_EXPLAINED]
        asks = [with_logprobs(self.asks[prompt]) for prompt, _, _ in differing]
        detailed = await explained(self.plain, asks)
        return [
            difference(prompt, f"speculative, {run}", one, other, detail)
            for (prompt, one, other), detail in zip(differing, detailed, strict=True)
        ]

    def _judge(self, section: ServerTexts, determinism: ServerTexts) -> tuple[Status, str]:
        total = sum(run.num_prompts for run in section.runs)
        differing = total - sum(run.num_identical for run in section.runs)
        parted = f"{differing} of {total} texts differ from those without drafts"
        if determinism.status == "failed":
            return "not claimed", f"{parted}; that server does not repeat itself"
        causes = {difference.cause for difference in section.differences}
        if bad := [one for one in section.differences if one.cause in ("error", "length")]:
            return "failed", f"{parted}; {_where(bad[0])}"
        if differing and causes == {"rounding"}:
            return "inconclusive", (
                f"{parted}, each at a near-tie (at most {NEAR_TIE:g} nats between the two tokens): "
                "neither identical nor wrong"
            )
        if differing:
            worst = next(one for one in section.differences if one.cause == "unknown")
            return "inconclusive", f"{parted}; {_where(worst)}"
        if missing := len(self.asks) * len(section.runs) - total:
            return "inconclusive", f"{missing} of {total + missing} texts are missing: see failures"
        if not any(one.text for _, one, _ in self._pairs("speculative", ALONE)):
            return "inconclusive", "all texts are empty: choose other prompts"
        if unsure := undrafted(self.plain, self.speculative, GREEDY):
            return "inconclusive", unsure
        how = "alone and several at once" if len(section.runs) > 1 else "alone"
        return "passed", f"{total} texts, asked for {how}: every character is the same"


def with_logprobs(ask: Ask) -> Ask:
    """A request that also asks for log-probabilities of the likeliest tokens."""
    is_chat = "messages" in ask.body
    wanted = {"logprobs": True, "top_logprobs": TOP} if is_chat else {"logprobs": TOP}
    return replace(ask, body=ask.body | wanted)


async def explained(side: Side, asks: Sequence[Ask]) -> list[Stream | None]:
    """Answers with log-probabilities. A server that refuses them has failed at nothing."""
    answers: list[Stream | None] = []
    for ask in asks:
        if side.is_given_up:  # each would be waited for as long again
            answers.append(None)
            continue
        try:
            body = {**ask.body, "model": side.model, **side.fields}
            answers.append(await side.client.stream(ask.path, body))
        except OutriderError:
            answers.append(None)
    return answers


def difference(
    prompt: int, run: str, plain: Stream, other: Stream, detail: Stream | None
) -> ServerTextDifference:
    """The place where two texts part, and why. `detail`: the plain answer once more, with log-probabilities
    where the server gives them."""
    one, two = plain.text, other.text
    same = zip(one, two, strict=False)
    position = next((at for at, (a, b) in enumerate(same) if a != b), min(len(one), len(two)))
    gap = None if detail is None else gap_at(detail.logprobs, one, two, position)
    is_cut = position == min(len(one), len(two)) and (
        plain.finish_reason == other.finish_reason == "length"
    )
    return ServerTextDifference(
        prompt=prompt,
        run=run,
        position=position,
        expected_text=one[position : position + SHOWN],
        found_text=two[position : position + SHOWN],
        gap=None if gap is None else gap[0],
        is_least=gap is not None and gap[1],
        cause="length" if is_cut else _cause(gap),
    )


def _cause(gap: tuple[float, bool] | None) -> ServerCause:
    """The cause that a gap speaks for; True beside it: it is known to be that wide at least."""
    if gap is None:
        return "unknown"
    nats, is_least = gap
    if nats > CLEAR:
        return "error"
    return "rounding" if nats <= NEAR_TIE and not is_least else "unknown"


def _where(difference: ServerTextDifference) -> str:
    """A difference in words."""
    place = (
        f"prompt {difference.prompt + 1}, character {difference.position + 1} ({difference.run}): "
    )
    if difference.cause == "length":
        return f"{place}one text ends where the other goes on, and both ended at max_tokens"
    if difference.gap is None:
        return f"{place}cannot tell rounding from error without log-probabilities there"
    least = "at least " if difference.is_least else ""
    nats = f"the other token is {least}{difference.gap:.2f} nats less likely"
    if difference.cause == "error":
        return f"{place}{nats}, more than rounding explains"
    return f"{place}{nats}: cannot tell rounding from error"


def undrafted(plain: Side, speculative: Side, section: str) -> str:
    """Why the texts of a section are no comparison; empty where nothing speaks against it."""
    if plain.drafted.get(section):
        return (
            f"the server without drafts drafted, too ({plain.drafted[section]} by its own count), "
            "or others asked it meanwhile"
        )
    if speculative.drafted.get(section) == 0:
        return "the server with drafts drafted nothing: choose prompts it has guesses for"
    return ""


async def sampled_section(
    requests: Sequence[WorkloadRequest], plan: ServerPlan, plain: Side, speculative: Side
) -> ShortTexts:
    """Short sampled texts, half of them with a seed, in turns of both servers."""
    chosen = requests[:SAMPLED_PROMPTS]
    draws = _draws(chosen, plan)
    plain.progress.stage("sampled text", 2 * plan.samples)
    strata = {
        (number, seeded): Stratum() for number in range(len(chosen)) for seeded in (True, False)
    }
    size = -(-len(draws) // TURNS)
    for start in range(0, len(draws), size):
        for column, side in enumerate((plain, speculative)):
            turn = draws[start : start + size]
            answers = await side.ask(SAMPLED, [asks[column] for _, asks in turn], plan.concurrency)
            for (key, _), answer in zip(turn, answers, strict=True):
                if answer is not None:
                    own = (strata[key].plain, strata[key].speculative)[column]
                    own.append(answer.text[:MAX_SHORT])
    section = ShortTexts(
        status="passed",
        why="",
        temperature=plan.drawing.temperature,
        num_tokens=plan.drawing.required_max_tokens,
        num_prompts=len(chosen),
        tests=two_sample_tests(strata),
    )
    section.status, section.why = _judged(section, strata, plan.samples, plain, speculative)
    return section


Key = tuple[int, bool]  # prompt, and whether a seed is given


def _draws(
    chosen: Sequence[WorkloadRequest], plan: ServerPlan
) -> list[tuple[Key, tuple[Ask, Ask]]]:
    """For every draw its stratum, and the request to either server: the same, with seeds of its
    own."""
    seeds = np.random.SeedSequence([plan.seed, 2]).generate_state(2 * plan.samples) >> 1
    draws = []
    for number in range(plan.samples):
        prompt = number % len(chosen)
        seeded = number // len(chosen) % 2 == 0
        both = [
            plan.ask(chosen[prompt], replace(plan.drawing, seed=int(seed) if seeded else None))
            for seed in seeds[2 * number : 2 * number + 2]
        ]
        draws.append(((prompt, seeded), (both[0], both[1])))
    return draws


def two_sample_tests(strata: Mapping[Key, Stratum]) -> list[TwoSampleTest]:
    """Tests of all draws, of those with seeds and of those without, corrected for their number."""
    parts: dict[DrawnWith, list[Stratum]] = {
        "all": list(strata.values()),
        "with seeds": [stratum for (_, seeded), stratum in strata.items() if seeded],
        "without seeds": [stratum for (_, seeded), stratum in strata.items() if not seeded],
    }
    statistics = {
        (drawn, view): homogeneity(part, view) for drawn, part in parts.items() for view in VIEWS
    }
    rejected = holm([statistic.p_value for statistic in statistics.values()], FALSE_ALARMS)
    return [
        TwoSampleTest(
            **statistic.model_dump(),
            drawn=drawn,
            view=view,
            rejected=no,
            detectable_total_variation=detectable_between(
                statistic, FALSE_ALARMS / len(statistics), POWER
            ),
        )
        for ((drawn, view), statistic), no in zip(statistics.items(), rejected, strict=True)
    ]


def _judged(
    section: ShortTexts,
    strata: Mapping[Key, Stratum],
    samples: int,
    plain: Side,
    speculative: Side,
) -> tuple[Status, str]:
    what = f"{section.tests[0].num_draws} sampled texts of each server"
    rejected = [test for test in section.tests if test.rejected]
    if rejected:
        first = min(rejected, key=lambda test: test.p_value)
        of = "" if first.drawn == "all" else f" ({first.drawn})"
        return "failed", f"{what} differ in their {first.view}{of} (p = {first.p_value:.1e})"
    drawn = [len(texts) for one in strata.values() for texts in (one.plain, one.speculative)]
    if sum(drawn) < 2 * samples:
        return (
            "inconclusive",
            f"{2 * samples - sum(drawn)} of {2 * samples} texts are missing: see failures",
        )
    finds = section.finds
    if all(len({*one.plain, *one.speculative}) == 1 for one in strata.values()):
        return "inconclusive", (
            f"{what} are one for each prompt: there was nothing to test, raise --temperature"
        )
    if finds is None or finds > WORST_DETECTABLE:
        only = "nothing" if finds is None else f"only a total variation of {finds:.2f}"
        return "inconclusive", f"{what} are too few: {only} would be found; raise --samples"
    if unsure := undrafted(plain, speculative, SAMPLED):
        return "inconclusive", unsure
    return "passed", (
        f"{what} are alike; a total variation of {finds:.3f} would be found in {POWER:.0%} of cases"
    )


def _notes(workload: Workload, plan: ServerPlan, plain: Side, speculative: Side) -> Iterator[str]:
    yield from workload.notes
    if plan.sampling.is_greedy:
        yield "no --temperature was given: the sampled texts are of temperature 1"
    if speculative.drafted.get(GREEDY) is None:
        yield "the server with drafts does not say how much it drafts: whether it did is not known"
    for side in (plain, speculative):
        yield from dict.fromkeys(f"{side.label}: {note}" for note in side.notes)
        if side.num_miscounted:
            yield (
                f"{side.label}: {counted(side.num_miscounted, 'answer')} with a count of tokens "
                "that cannot be (more than asked for, or none for a text); texts are compared"
            )
    yield "sampling parameters that were not given are the servers' own defaults"
