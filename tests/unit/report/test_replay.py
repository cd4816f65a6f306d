"""What the report of a replay says."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.lab.configuration import Configuration
from outrider.lab.estimate.curves import StepCosts
from outrider.lab.replay import Text, replay, summarise
from outrider.lab.replay.result import Acceptance, ReplayedConfiguration, ReplayResult
from outrider.lab.replay.search import search
from outrider.lab.result import Interval
from outrider.report.document import Bullets, Code, Document, Heading, Paragraph, Plot, Table
from outrider.report.render import render
from outrider.report.replay import document, verdict

PERIOD = [2, 3, 4, 5, 6, 7]
TEXTS = [Text([1, *PERIOD], PERIOD[: 3 + n % 3] * 3, task="even" if n % 2 == 0 else "odd") for n in range(12)]
FLAT = StepCosts.of_steps({0: 0.01, 8: 0.01})


def result(*labels: str, costs: StepCosts | None = None, **changes: Any) -> ReplayResult:
    found = [summarise(replay(TEXTS, Configuration.parse(label)), TEXTS, costs) for label in labels]
    facts: dict[str, Any] = {
        "workload": "log.jsonl", "tokenizer": "demo", "order": "logged", "seed": 0, "max_num_seqs": 1, "num_texts": 12,
        "num_tokens": 144, "skipped": [], "costs": costs, "configurations": found, "searches": [],
    }  # fmt: skip
    return ReplayResult(**(facts | changes))


def acceptance(tau: float, speedup: float | None, drafted: int = 10) -> Acceptance:
    interval = Interval(value=tau, low=tau - 0.1, high=tau + 0.1)
    return Acceptance(
        num_texts=9, steps=100, emitted=round(100 * tau), drafted=drafted, tested=10, accepted=5, accepted_per_position=[4, 1],
        widths=[90, 10], tau=tau, tau_interval=interval, alpha=0.5, draft_utilisation=0.5, speedup=speedup, speedup_interval=None,
    )  # fmt: skip


def configured(label: str, tau: float, speedup: float | None, drafted: int = 10) -> ReplayedConfiguration:
    return ReplayedConfiguration(
        configuration=label, family=label.split()[0], drafter=label.split()[0], num_draft_tokens=4, settings={}, trees=False,
        learns=False, overall=acceptance(tau, speedup, drafted), by_task={}, draft_s_per_step=1e-4, charged_draft_s=0.0,
        tokens_per_s=1e4, outside_costs=0,
    )  # fmt: skip


def blocks(found: Document, kind: type) -> list[Any]:
    return [block for block in found.blocks if isinstance(block, kind)]


@pytest.mark.parametrize(
    ("configurations", "sentence", "tone"),
    [
        ([configured("ngram", 1.3, 1.2), configured("suffix", 1.5, 1.1)],
         "Best of these texts: 'ngram', predicted speedup 1.20x", "good"),
        ([configured("none", 1.0, 1.0), configured("suffix", 1.5, 0.9)],
         "Do not speculate on these texts: the best, 'suffix'", "bad"),
        ([configured("suffix", 1.5, 1.03)], "Hardly a gain", "caution"),
        ([configured("ngram", 1.3, None), configured("suffix", 1.5, None)],
         "'suffix', τ 1.50 [1.40, 1.60]. Its speedup is below 1.50x", "plain"),
        ([configured("ngram", 1.3, None, 50), configured("suffix", 1.3, None, 40)], "'suffix'", "plain"),
        ([configured("ngram", 1.02, None)], "'ngram'", "caution"),
        ([configured("none", 1.0, None)], "Only plain decoding", "caution"),
    ],
)  # fmt: skip
def test_verdicts(configurations: list[ReplayedConfiguration], sentence: str, tone: str) -> None:
    """Catches the most tokens praised where they cost more than they bring, and plain decoding named best."""
    said, meant = verdict(result(configurations=configurations))
    assert sentence in said
    assert meant == tone


def test_the_document_has_what_was_found() -> None:
    """Catches numbers of another row, a mark on the wrong one, and formulas that are missing."""
    found = result("ngram k=4", "none", "ngram-cache", notes=["a note"])
    page = render(found)
    assert page == document(found)
    assert page.title == "Replay of log.jsonl"
    assert "12 texts, 144 tokens by the tokenizer of demo; no model was run" in page.subtitle
    table, tasks = blocks(page, Table)
    best = max(found.configurations, key=lambda one: one.overall.tau)
    assert [table.rows[place][0] for place in table.marked] == [best.configuration]
    first = found.configurations[0].overall
    assert table.rows[0][1].startswith(f"{first.tau:.2f} [")
    assert table.rows[0][2:5] == (
        [f"{first.alpha:.2f}", f"{first.draft_utilisation:.2f}", f"{first.drafted / first.steps:.1f}"]
    )
    assert table.rows[1][2] == "-"
    assert "upper bound" in table.columns[1].help
    assert [column.heading for column in tasks.columns] == ["configuration", "even (6)", "odd (6)"]
    (plot,) = blocks(page, Plot)
    assert [series.label for series in plot.series] == ["ngram k=4", "ngram-cache"]  # plain decoding keeps nothing
    kept = [count / first.steps for count in first.accepted_per_position]
    assert list(plot.series[0].y)[: len(kept)] == kept
    assert blocks(page, Bullets)[-1].items == ["a note"]


def test_lengths_are_plotted_by_what_counts() -> None:
    """Catches a sweep drawn in the order of the rows, and tau drawn where speedups were predicted."""
    swept = result("ngram k=3", "ngram k=1", "ngram-cache k=2", "ngram k=2", costs=FLAT)
    plot = blocks(document(swept), Plot)[0]
    assert plot.title == "predicted speedup over draft length"
    assert list(plot.x) == [1, 2, 3]
    assert [series.label for series in plot.series] == ["ngram"]
    by_length = {one.num_draft_tokens: one.overall.speedup for one in swept.configurations if one.drafter == "ngram"}
    assert list(plot.series[0].y) == [by_length[length] for length in (1, 2, 3)]
    tasks = blocks(document(swept), Table)[1]
    assert [row[0] for row in tasks.rows] == ["ngram k=2", "ngram-cache k=2"] or len(tasks.rows) == 2


def test_a_search_says_what_it_is_worth() -> None:
    """Catches the number of the texts searched on sold as the gain, and settings that cannot be copied."""
    outcome = search(TEXTS, Configuration("ngram"), trials=4).outcome
    sure = outcome.model_copy(update={"gain": Interval(value=0.1, low=0.02, high=0.2)})
    unsure = outcome.model_copy(update={"gain": Interval(value=0.1, low=-0.02, high=0.2)})
    unknown = outcome.model_copy(update={"gain": None})
    page = document(result("ngram", searches=[sure, unsure, unknown]))
    assert [block.text for block in blocks(page, Heading)][:1] == ["Search around 'ngram'"]
    assert [block.text for block in blocks(page, Code)] == [outcome.best.configuration] * 3
    said = [(block.text, block.tone) for block in blocks(page, Paragraph)]
    assert ("Better settings: +10.0% [+2.0%, +20.0%] on texts that the search did not see.", "good") in said
    assert any(text.startswith("No settings that are certainly better: +10.0% [-2.0%") for text, _ in said)
    assert any(text.startswith("Too few texts (6 kept back)") and tone == "caution" for text, tone in said)
    table = blocks(page, Table)[2]
    assert table.rows[1][2] == f"{outcome.train_best:.2f}"
