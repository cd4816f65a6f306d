"""The sampled distribution: drawn through the real engine, compared with teacher-forced
conditionals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from outrider.lab.certify import sampled
from outrider.lab.certify.certify_result import POWER, SampledDistribution
from outrider.lab.certify.gtest import GStatistic, detectable
from outrider.lab.certify.points import Spot, conditionals, find_spots, probs_along
from outrider.lab.certify.sampled import (
    FALSE_ALARMS,
    draw,
    followers,
    longest,
    sampled_distribution,
)
from outrider.lab.certify.subject import Subject
from outrider.lab.journal import Journal, Units
from outrider.lab.progress import Progress
from outrider.sampling.params import SamplingParams
from tests.unit.lab.certify.conftest import PROMPTS, Open

pytestmark = pytest.mark.usefixtures("shorter_texts")
WARM = SamplingParams(temperature=1.0)
PENALISED = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.5, presence_penalty=0.7)
BANNED = SamplingParams(temperature=1.0, min_tokens=4, bad_words=["w8 w9"])


def spots_of(subject: Subject, params: SamplingParams = WARM, count: int = 4) -> list[Spot]:
    answers = [
        subject.texts(subject.plain, [p], [SamplingParams(max_tokens=10)])[0] for p in PROMPTS
    ]
    return find_spots(subject, PROMPTS, answers, params, count, Progress())


def section(
    subject: Subject, samples: int = 600, seed: int = 0, params: SamplingParams = WARM
) -> SampledDistribution:
    return sampled_distribution(subject, spots_of(subject, params), params, samples, seed, Units())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "verifier", "options"),
    [
        ("draft-model", "block", {}),
        ("draft-model", "traversal", {"drafter_options": {"tree": "2x2"}}),
        pytest.param("draft-model", "gumbel", {}, marks=pytest.mark.nightly),
        ("ngram", "token", {}),
    ],
)
def test_sound_decoding_passes(
    open_subject: Open, drafter: str, verifier: str, options: dict[str, Any]
) -> None:
    found = section(open_subject(drafter, verifier, **options))
    assert found.status == "passed", found.why
    assert {"accepted", "correction", "bonus"} <= set(found.origins)
    assert found.num_samples == 600
    assert 0.05 < found.detectable_total_variation < 0.25
    continued = [one for one in found.tests if one.part == "continuations"]
    positions = {(one.sampler, one.first, one.last) for one in continued}
    assert positions == {("speculative", position, position) for position in (1, 2, 3)}
    for part in ("continuations", "long texts"):
        views = {one.view for one in found.tests if one.part == part}
        assert views == ({"tokens", "preference"} if drafter == "draft-model" else {"tokens"})
    # of a placed token there is no distribution
    reports = drafter == "draft-model" and verifier != "gumbel"
    assert {one.view for one in found.tests if one.part == "drafts"} == (
        {"likeliest first", "by id"} if reports else set()
    )
    assert all(one.num_draws >= 600 for one in found.tests if one.part == "long texts")


@pytest.mark.slow
def test_the_users_options_make_the_distribution_that_is_tested(open_subject: Open) -> None:
    """Penalties and filters on both sides."""
    assert section(open_subject(), params=PENALISED).status == "passed"


@pytest.mark.slow
@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("verifier", ["resamples", "drops", "clips"])
def test_biased_verifiers_fail(open_subject: Open, verifier: str) -> None:
    """The last of them is exact on every small vocabulary."""
    found = section(open_subject(verifier=verifier), 1000)
    assert found.status == "failed"
    plain = [one for one in found.tests if one.sampler == "plain"]
    assert plain, "drawn where the speculative sampler deviates"
    assert not any(one.rejected for one in plain)
    assert "is off" in found.why


@pytest.mark.slow
@pytest.mark.usefixtures("broken")
def test_a_biased_drafter_fails(open_subject: Open) -> None:
    """The verifier is sound; what it is given is not."""
    assert section(open_subject("withholding"), 1000).status == "failed"


@pytest.mark.usefixtures("broken")
def test_a_drafter_that_misreports_its_distribution_fails(open_subject: Open) -> None:
    """Emitted tokens show it late; what was drafted, at once."""
    found = section(open_subject("flattens"), 1000)
    assert found.status == "failed"
    assert "the drafter draws from another distribution than it reports" in found.why
    assert any(one.rejected for one in found.tests if one.part == "drafts")


def test_long_texts_that_deviate_alike_without_drafts_accuse_nobody(
    open_subject: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain texts are drawn where speculative ones deviate."""
    subject = open_subject()
    spots = spots_of(subject)

    def warmer(*given: Any) -> Any:
        *rest, params = given
        return probs_along(*rest, replace(params, temperature=1.5))

    monkeypatch.setattr("outrider.lab.certify.long_texts.probs_along", warmer)
    found = sampled_distribution(subject, spots, WARM, 600, 0, Units())
    assert {one.sampler for one in found.tests if one.part == "long texts"} == {
        "plain",
        "speculative",
    }
    assert found.status == "inconclusive"
    assert "plain sampler itself deviates at text from token" in found.why


@pytest.mark.slow
def test_a_broken_reference_accuses_nobody(
    open_subject: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where plain sampling fails the same test, the test is wrong, and no verdict follows from it."""
    subject = open_subject()
    spots = spots_of(subject)
    cold = SamplingParams(temperature=0.7)

    def colder(
        subject: Subject, sampler: Any, spot: Spot, params: Any, seeds: Any, depth: int
    ) -> dict[str, Any]:
        return draw(subject, sampler, spot, cold, seeds, depth)

    monkeypatch.setattr("outrider.lab.certify.sampled.draw", colder)
    found = sampled_distribution(subject, spots, WARM, 800, 0, Units())
    assert found.status == "inconclusive"
    assert "plain sampler itself deviates" in found.why


def test_too_few_samples_pass_nothing(open_subject: Open) -> None:
    found = section(open_subject(), 40)
    assert found.status == "inconclusive"
    assert "raise --samples" in found.why


def test_nothing_drafted_passes_nothing(open_subject: Open) -> None:
    """N-gram lookup on texts in which nothing repeats: then only plain sampling was tested."""
    subject = open_subject("ngram", "block", drafter_options={"min_ngram": "3", "max_ngram": "3"})
    spot = Spot(0, [5, 6, 7, 8, 9, 10], [], 3.0)
    found = sampled_distribution(subject, [spot], WARM, 600, 0, Units())
    assert found.status == "inconclusive"
    assert "proposed nothing" in found.why


@pytest.mark.slow
def test_certain_distributions_are_tested_by_every_draw(
    open_subject: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly greedy: one token that the target never says is enough."""
    subject = open_subject(runtime="eager")
    cold = SamplingParams(temperature=1e-4)
    spots = spots_of(subject, cold)
    found = sampled_distribution(subject, spots, cold, 200, 0, Units())
    assert found.status == "passed"
    assert found.detectable_total_variation < 0.05
    real = subject.drafting.verifier.verify
    monkeypatch.setattr(
        subject.drafting.verifier,
        "verify",
        lambda draft, p, rng, at: real(draft, p.roll(1, dims=-1), rng, at),
    )
    wrong = sampled_distribution(subject, spots, cold, 200, 0, Units())
    assert wrong.status == "failed"
    assert "never emits" in wrong.why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verifier", "many"),
    [
        ("block", 4),
        *(
            pytest.param(verifier, 12, marks=pytest.mark.nightly)
            for verifier in ("block", "gumbel")
        ),
    ],
)
def test_false_alarms_are_as_rare_as_stated(open_subject: Open, verifier: str, many: int) -> None:
    """Certificates of one sound pair with several seeds: none fails, and no more p-values are small
    than right tests have in 99 of 100 cases. With these seeds they are always the same ones."""
    subject = open_subject(verifier=verifier)
    spots = spots_of(subject)
    found = [sampled_distribution(subject, spots, WARM, 400, seed, Units()) for seed in range(many)]
    assert not any(one.rejected for section in found for one in section.tests)
    p_values = np.array([one.p_value for section in found for one in section.tests])
    for level in (0.05, 0.01):
        assert (p_values < level).sum() <= stats.binom.ppf(0.99, len(p_values), level)
    assert p_values.min() > FALSE_ALARMS / 100


# ------------------------------------------------ its parts


def statistics_of(p_values: list[float]) -> dict[sampled.Tested, GStatistic]:
    """Tests of one certificate that came out like this."""
    return {
        sampled.Tested("continuations", "speculative", "tokens", number, number): GStatistic(
            1000, 1000, 11, 20.0, 10, p_value, 0
        )
        for number, p_value in enumerate(p_values, 1)
    }


def test_a_certificate_of_several_tables_corrects_for_their_number() -> None:
    """One of twenty at half the level is chance. One at a fiftieth is not, and the next one then
    counts as one of nineteen."""
    level = FALSE_ALARMS
    for p_values, rejected in (
        ([level / 2, *[0.5] * 19], [0]),
        ([level / 2], [1]),
        ([level / 50, level / 19.5, *[0.5] * 18], [1, 1]),
        ([level / 50, level / 18.5, *[0.5] * 18], [1, 0]),
        ([level * 0.9, level / 50, level / 2.1], [1, 1, 1]),
    ):
        judged = [test.rejected for test in sampled._tests(statistics_of(p_values))]
        assert judged == [*map(bool, rejected), *[False] * (len(p_values) - len(rejected))], (
            p_values
        )


def test_certificates_of_many_tables_raise_as_few_false_alarms_as_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty tests each of a sound sampler, at a level that can be counted: 1 of 20 certificates
    fails, not 2 of 3."""
    monkeypatch.setattr("outrider.lab.certify.sampled.FALSE_ALARMS", 0.05)
    monkeypatch.setattr("outrider.lab.certify.sampled.detectable", lambda *given: None)
    rng = np.random.default_rng(0)
    failed = [
        any(one.rejected for one in sampled._tests(statistics_of(rng.random(20).tolist())))
        for _ in range(1000)
    ]
    assert stats.binom.ppf(0.001, 1000, 0.05) <= sum(failed) <= stats.binom.ppf(0.999, 1000, 0.05)


def test_what_a_table_would_find_is_at_the_level_that_it_gets() -> None:
    """The more tables a certificate has, the less each finds."""
    alone, among_many = (sampled._tests(statistics_of([0.5] * num))[0] for num in (1, 20))
    assert among_many.detectable_total_variation > alone.detectable_total_variation
    [one] = statistics_of([0.5]).values()
    assert among_many.detectable_total_variation == detectable(one, FALSE_ALARMS / 20, POWER)


@pytest.mark.parametrize("params", [WARM, PENALISED, BANNED], ids=["plain", "penalties", "bans"])
def test_conditionals_are_those_of_plain_decoding(
    open_subject: Open, params: SamplingParams
) -> None:
    """Row by row, beginning by beginning: what a step of plain decoding would draw from after that
    text."""
    subject = open_subject()
    spot = Spot(0, PROMPTS[0], [44, 17], 3.0)
    found = dict(conditionals(subject, subject.target, spot, [(3, 9), (3, 44), (8,)], params))
    assert set(found) == {(), (3,), (3, 9), (3, 44), (8,)}
    for beginning, probs in found.items():
        tokens = [*spot.tokens, *beginning]
        subject.plain.add(subject.row(0, tokens, len(spot.prompt), params, seed=0, room=2))
        with subject.plain.watched():
            subject.plain.step()
        subject.plain.remove(0)
        assert np.allclose(probs, subject.plain.seen.probs[0, 0].numpy(), atol=1e-5)
        assert probs.sum() == pytest.approx(1, abs=1e-12)
    if params is BANNED:
        assert found[()][0] == found[(3,)][0] == 0 < found[(3, 9)][0], "by then it is long enough"
        assert found[(8,)][9] == 0 < found[()][9]


def test_distributions_along_an_answer_are_the_conditionals(open_subject: Open) -> None:
    """Two ways to the same distributions, the first in chunks."""
    subject = open_subject()
    answer = list(range(10, 50))
    along = list(probs_along(subject, subject.target, PROMPTS[0], answer, PENALISED))
    assert len(along) == 40
    for position in (0, 5, 31, 32, 39):
        probs = dict(
            conditionals(
                subject,
                subject.target,
                Spot(0, PROMPTS[0], answer[:position], 0.0),
                [()],
                PENALISED,
            )
        )[()]
        assert np.allclose(along[position], probs, atol=1e-5)
    assert subject.target.kv.num_rows == 0


def test_spots_are_where_something_is_drafted(open_subject: Open) -> None:
    subject = open_subject("ngram", "block")
    spots = spots_of(subject, count=5)
    assert 1 <= len(spots) <= 5
    assert all(len(spot.output) < 10 for spot in spots)
    assert max(sum(one.prompt_number == spot.prompt_number for one in spots) for spot in spots) <= 3


def test_followers_and_longest() -> None:
    after = followers({(1, 2): 3, (1,): 2, (4, 5): 1})
    assert after == {(): [1, 1, 1, 1, 1, 4], (1,): [2, 2, 2], (4,): [5]}
    assert longest([(), (1,), (1, 2), (3,)]) == [(1, 2), (3,)]


def test_drafts_are_cut_for_half_of_the_rows(open_subject: Open) -> None:
    """Otherwise no bonus token would be among the first three of drafts of five."""
    subject = open_subject(num_draft_tokens=5)
    found = draw(subject, "speculative", spots_of(subject)[0], WARM, list(range(60)), 3)
    assert found["origins"]["bonus"] > 0
    assert sum(found["texts"].values()) == 60
    assert len(subject.drafting.rows) == 0


def test_draws_depend_on_their_seeds_alone(open_subject: Open) -> None:
    """Not on the batch: the same seeds in two halves."""
    subject = open_subject()
    spot = spots_of(subject)[0]
    whole = draw(subject, "speculative", spot, WARM, list(range(20)), 3)["texts"]
    halves = [
        draw(subject, "speculative", spot, WARM, list(part), 3)["texts"]
        for part in (range(10), range(10, 20))
    ]
    assert sum(whole.values()) == 20
    merged = {text: sum(half.get(text, 0) for half in halves) for text in {*halves[0], *halves[1]}}
    assert merged == whole


@pytest.mark.slow
def test_a_resumed_run_draws_what_is_missing_only(open_subject: Open, tmp_path: Any) -> None:
    """Finished units come from the journal, and the result is the same."""
    subject = open_subject()
    path = tmp_path / "journal"
    spots = spots_of(subject)
    units = Units(Journal.open(path, {}, resume=False))
    whole = sampled_distribution(subject, spots, WARM, 300, 0, units)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]))
    resumed = sampled_distribution(
        subject, spots, WARM, 300, 0, Units(Journal.open(path, {}, resume=True))
    )
    assert resumed == whole
    assert len(path.read_text().splitlines()) == len(lines)
