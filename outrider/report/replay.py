"""The report of a replay."""

from __future__ import annotations

from outrider.counted import counted
from outrider.lab.configuration import PLAIN
from outrider.lab.replay.replay_result import AcceptanceCounts, ReplayedConfiguration, ReplayResult, SearchOutcome
from outrider.report.document import (
    Block,
    Bullets,
    CodeBlock,
    Column,
    Document,
    Fact,
    Heading,
    Paragraph,
    Table,
    Tone,
    curves,
    table,
)  # fmt: skip
from outrider.report.render import origin, to_keep_in_mind
from outrider.report.text import interval, number

HARDLY = 1.05  # a predicted speedup below this is no reason to speculate
TAU = (
    "emitted / steps: tokens per target pass, the target's own included. The upper bound of the speedup: what it would be if a "
    "pass over k + 1 tokens cost the same as one over one token, and drafting nothing"
)
COLUMNS: tuple[Fact[ReplayedConfiguration], ...] = (
    Fact("configuration", lambda one: one.configuration, align="left"),
    Fact("τ", lambda one: interval(one.overall.tau), TAU),
    Fact("α", lambda one: number(one.overall.alpha), "accepted / tested draft tokens"),
    Fact("draft utilisation", lambda one: number(one.overall.draft_utilisation), "accepted / drafted tokens"),
    Fact(
        "drafted per step", lambda one: number(one.overall.drafted / one.overall.steps, 1),
        "drafted / steps: each of these tokens makes a target pass wider",
    ),
    Fact(
        "drafter, µs per step", lambda one: number(one.draft_s_per_step * 1e6, 0),
        "time spent in the drafter / steps, on the machine of the replay",
    ),
)  # fmt: skip
SPEEDUP: Fact[ReplayedConfiguration] = Fact(
    "predicted speedup", lambda one: _cell(one.overall),
    "emitted × seconds of a plain step / seconds of all steps, by their width and the costs given, with drafting",
)  # fmt: skip


def document(result: ReplayResult) -> Document:
    """Everything in it is in the result."""
    blocks: list[Block] = [Paragraph(*verdict(result)), _overview(result), *_sweeps(result), *_tasks(result)]
    blocks += _positions(result)
    for found in result.searches:
        blocks += _search(found)
    blocks += to_keep_in_mind(result)
    count = counted(result.num_texts, "text")
    subtitle = origin(result, f"{count}, {result.num_tokens} tokens by the tokenizer of {result.tokenizer}; no model was run")
    return Document(f"Replay of {result.workload}", subtitle, blocks)


def verdict(result: ReplayResult) -> tuple[str, Tone]:
    """One sentence, and how it is meant."""
    best = _best(result)
    if best is None:
        return "Only plain decoding was replayed: one token per target pass.", "caution"
    tau = f"τ {interval(best.overall.tau)}"
    name = f"'{best.configuration}'"
    if best.overall.speedup is None:
        bound = f"Its speedup is below {best.overall.tau.value:.2f}x, what it would be if draft tokens were checked for nothing"
        text = f"Most tokens per target pass: {name}, {tau}. {bound}; --costs predicts it, 'outrider bench' measures it."
        return text, "plain" if best.overall.tau.value >= HARDLY else "caution"
    speedup = interval(best.overall.speedup, "x")
    if best.overall.speedup.value < 1:
        return f"Do not speculate on these texts: the best, {name}, is predicted at {speedup}, {tau}.", "bad"
    if best.overall.speedup.value < HARDLY:
        return f"Hardly a gain: the best of these texts, {name}, is predicted at {speedup}, {tau}.", "caution"
    return f"Best of these texts: {name}, predicted speedup {speedup}, {tau}.", "good"


def _best(result: ReplayResult) -> ReplayedConfiguration | None:
    """By predicted speedup, else by tau; of equals the one that drafts less. None where nothing drafts."""
    drafting = [one for one in result.configurations if one.drafter != PLAIN]
    return max(drafting, key=lambda one: (_objective(one.overall), -one.overall.drafted), default=None)


def _objective(found: AcceptanceCounts) -> float:
    return (found.speedup or found.tau).value


def _overview(result: ReplayResult) -> Table:
    best = _best(result)
    marked = frozenset(index for index, one in enumerate(result.configurations) if one is best)
    facts = [*COLUMNS, SPEEDUP] if result.costs is not None else COLUMNS
    return table(result.configurations, facts, "All texts (95 % intervals in brackets)", marked)


def _sweeps(result: ReplayResult) -> list[Block]:
    """Draft lengths, where a family has several."""
    families: dict[str, dict[int, float]] = {}
    for one in result.configurations:
        families.setdefault(one.family, {})[one.num_draft_tokens] = _objective(one.overall)
    swept = {family: members for family, members in families.items() if len(members) > 1}
    if not swept:
        return []
    what = "τ" if result.costs is None else "predicted speedup"
    return [curves(f"{what} over draft length", "k, most draft tokens per step", what, swept, baseline=1.0)]


def _tasks(result: ReplayResult) -> list[Block]:
    tasks = sorted({task for one in result.configurations for task in one.by_task})
    if len(tasks) < 2:
        return []
    what = "τ" if result.costs is None else "predicted speedup"
    columns = [Column("configuration", align="left"), *(Column(f"{task} ({_num_texts(result, task)})") for task in tasks)]
    rows = [[one.configuration, *(_cell(one.by_task[task]) for task in tasks)] for one in _champions(result)]
    return [Table(columns, rows, f"{what} by task (number of texts)")]


def _num_texts(result: ReplayResult, task: str) -> int:
    return next(one.by_task[task].num_texts for one in result.configurations if task in one.by_task)


def _cell(found: AcceptanceCounts) -> str:
    return interval(found.speedup, "x") if found.speedup else interval(found.tau)


def _positions(result: ReplayResult) -> list[Block]:
    champions = [one for one in _champions(result) if one.overall.accepted]
    if not champions:
        return []
    lines = {}
    for one in champions:
        counts = enumerate(one.overall.accepted_per_position, 1)
        lines[one.configuration] = {position: count / one.overall.steps for position, count in counts}
    return [curves("How far drafts are kept", "draft token", "share of all steps that keep it", lines)]


def _champions(result: ReplayResult) -> list[ReplayedConfiguration]:
    """The best member of each family, so that a sweep does not fill the page."""
    best: dict[str, ReplayedConfiguration] = {}
    for one in result.configurations:
        if one.family not in best or _objective(one.overall) > _objective(best[one.family].overall):
            best[one.family] = one
    return list(best.values())


def _search(found: SearchOutcome) -> list[Block]:
    """What was found on one half of the texts, and what it is worth on the other."""
    what = {"tau": "τ", "speedup": "predicted speedup"}[found.objective]
    columns = [Column("settings", align="left"), Column(f"{what}, texts kept back"), Column(f"{what}, texts searched on")]
    rows = [
        [f"as given: {found.start.configuration}", _cell(found.start.overall), number(found.train_start)],
        ["as found", _cell(found.best.overall), number(found.train_best)],
    ]
    return [
        Heading(f"Search around '{found.start.configuration}'"),
        Paragraph(*_gain(found)),
        Table(columns, rows, marked=frozenset({1})),
        Paragraph("As found:"),
        CodeBlock(found.best.configuration),
        Paragraph(
            f"{counted(found.num_trials, 'trial')} on {counted(found.num_train, 'text')}; {found.num_held_out} others were kept "
            "back. Searched:"
        ),
        Bullets([f"{name}: {range_}" for name, range_ in found.space.items()]),
    ]


def _gain(found: SearchOutcome) -> tuple[str, Tone]:
    gain = found.gain
    if gain is None:
        return f"Too few texts ({found.num_held_out} kept back) to say whether the settings found are better.", "caution"
    text = f"{gain.value:+.1%} [{gain.low:+.1%}, {gain.high:+.1%}] on texts that the search did not see"
    if gain.low > 0:
        return f"Better settings: {text}.", "good"
    return f"No settings that are certainly better: {text}. Keep the ones given.", "plain"
