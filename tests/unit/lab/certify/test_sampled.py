"""The sampled distribution: texts drawn through the real engine, compared with teacher-forced
conditionals."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.lab.certify import sampled
from outrider.lab.certify.certify_result import POWER, DistributionTest, SampledDistribution
from outrider.lab.certify.ranks import detectable
from outrider.lab.certify.sampled import (
    BANDS,
    FALSE_ALARMS,
    LATEST,
    Draws,
    bands_of,
    judged,
    probs_along,
)
from outrider.lab.certify.subject import Subject
from outrider.lab.journal import Journal
from outrider.sampling.params import SamplingParams
from tests.unit.lab.certify.conftest import PROMPTS, Open

WARM = SamplingParams(temperature=1.0)
PENALISED = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.5, presence_penalty=0.7)
BANNED = SamplingParams(temperature=1.0, min_tokens=4, bad_words=["w8 w9"])
short = pytest.mark.usefixtures("shorter_texts")


def section(
    subject: Subject, samples: int = 600, seed: int = 0, params: SamplingParams = WARM
) -> SampledDistribution:
    return Draws(subject, PROMPTS, params, samples, seed, Journal()).section()


@short
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
    assert {"accepted", "correction"} <= set(found.origins)
    assert found.num_tokens == sum(found.origins.values()) >= BANDS * 600
    assert 0.05 < (found.finds("texts") or 0) < 0.25
    views = {one.view for one in found.tests if one.part == "texts"}
    both = {"likeliest first", "by id"}
    assert views == (both | {"preference"} if drafter == "draft-model" else both)
    # of a placed token there is no distribution
    reports = drafter == "draft-model" and verifier != "gumbel"
    assert {one.view for one in found.tests if one.part == "drafts"} == (both if reports else set())
    assert all(one.num_draws >= 600 for one in found.tests if one.part == "texts")


@pytest.mark.slow
@short
def test_the_users_options_make_the_distribution_that_is_tested(open_subject: Open) -> None:
    """Penalties and filters on both sides."""
    assert section(open_subject(), params=PENALISED).status == "passed"


@pytest.mark.slow
@short
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


@short
@pytest.mark.usefixtures("broken")
def test_a_biased_drafter_fails(open_subject: Open) -> None:
    """The verifier is sound; what it is given is not."""
    assert section(open_subject("withholding"), 1000).status == "failed"


@pytest.mark.slow
@short
@pytest.mark.usefixtures("broken")
def test_a_drafter_that_misreports_its_distribution_fails(open_subject: Open) -> None:
    """Emitted tokens show it late; what was drafted, at once."""
    found = section(open_subject("flattens"), 1000)
    assert found.status == "failed"
    assert "the drafter draws from another distribution than it reports" in found.why
    assert any(one.rejected for one in found.tests if one.part == "drafts")


@short
def test_a_broken_reference_accuses_nobody(
    open_subject: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain texts are drawn where speculative ones deviate; where plain sampling fails the same
    test, the test is wrong, and no verdict follows from it."""
    subject = open_subject()

    def warmer(*given: Any) -> Any:
        *rest, params = given
        return probs_along(*rest, replace(params, temperature=1.5))

    monkeypatch.setattr(sampled, "probs_along", warmer)
    found = section(subject)
    assert {one.sampler for one in found.tests} == {"plain", "speculative"}
    assert found.status == "inconclusive"
    assert "plain sampler itself deviates at text from token" in found.why


@short
def test_too_few_samples_pass_nothing(open_subject: Open) -> None:
    found = section(open_subject(), 40)
    assert found.status == "inconclusive"
    assert "raise --samples" in found.why


@short
def test_nothing_drafted_passes_nothing(open_subject: Open) -> None:
    """N-gram lookup on texts in which nothing repeats: then only plain sampling was tested."""
    options = {"min_ngram": "12", "max_ngram": "12"}
    found = section(open_subject("ngram", "block", drafter_options=options))
    assert found.status == "inconclusive"
    assert "proposed nothing" in found.why


@pytest.mark.slow
@short
def test_certain_distributions_are_tested_by_every_draw(
    open_subject: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly greedy: one token that the target never says is enough."""
    subject = open_subject(runtime="eager")
    cold = SamplingParams(temperature=1e-4)
    found = section(subject, 200, params=cold)
    assert found.status == "passed"
    assert (found.finds("texts") or 1) < 0.05
    real = subject.drafting.verifier.verify
    monkeypatch.setattr(
        subject.drafting.verifier,
        "verify",
        lambda draft, p, rng, at: real(draft, p.roll(1, dims=-1), rng, at),
    )
    wrong = section(subject, 200, params=cold)
    assert wrong.status == "failed"
    assert "never emits" in wrong.why


@short
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
    found = [section(subject, 400, seed) for seed in range(many)]
    assert not any(one.rejected for section in found for one in section.tests)
    p_values = np.array([one.p_value for section in found for one in section.tests])
    for level in (0.05, 0.01):
        assert (p_values < level).sum() <= stats.binom.ppf(0.99, len(p_values), level)
    assert p_values.min() > FALSE_ALARMS / 100


# ------------------------------------------------ several tests


def outcomes_of(p_values: list[float]) -> list[DistributionTest]:
    """Tests of one certificate that came out like this."""
    return [
        DistributionTest(
            part="texts",
            sampler="speculative",
            view="by id",
            first=number,
            last=number,
            num_draws=1000,
            num_uncertain=1000,
            num_cells=11,
            g=20.0,
            df=10,
            p_value=p_value,
            impossible=0,
        )
        for number, p_value in enumerate(p_values, 1)
    ]


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
        found = [test.rejected for test in judged(outcomes_of(p_values))]
        assert found == [*map(bool, rejected), *[False] * (len(p_values) - len(rejected))], p_values


def test_certificates_of_many_tables_raise_as_few_false_alarms_as_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty tests each of a sound sampler, at a level that can be counted: 1 of 20 certificates
    fails, not 2 of 3."""
    monkeypatch.setattr(sampled, "FALSE_ALARMS", 0.05)
    monkeypatch.setattr(sampled, "detectable", lambda *given: None)
    rng = np.random.default_rng(0)
    failed = [
        any(one.rejected for one in judged(outcomes_of(rng.random(20).tolist())))
        for _ in range(1000)
    ]
    assert stats.binom.ppf(0.001, 1000, 0.05) <= sum(failed) <= stats.binom.ppf(0.999, 1000, 0.05)


def test_what_a_table_would_find_is_at_the_level_that_it_gets() -> None:
    """The more tables a certificate has, the less each finds."""
    alone, among_many = (
        judged(outcomes_of([0.5] * num))[0].detectable_total_variation for num in (1, 20)
    )
    assert alone is not None
    assert among_many is not None
    assert among_many > alone
    [one] = outcomes_of([0.5])
    assert among_many == detectable(one, FALSE_ALARMS / 20, POWER)


# ------------------------------------------------ its parts


@pytest.mark.parametrize("params", [WARM, PENALISED, BANNED], ids=["plain", "penalties", "bans"])
def test_conditionals_are_those_of_plain_decoding(
    open_subject: Open, params: SamplingParams
) -> None:
    """Token by token, across the chunks of a pass: what a step of plain decoding would draw from."""
    subject = open_subject()
    prompt = PROMPTS[0]
    answer = [3, 8, *range(10, 48)]
    found = torch.cat(list(probs_along(subject, subject.target, prompt, answer, params)))
    assert len(found) == 40
    for position in (0, 1, 2, 5, 31, 32, 39):
        tokens = [*prompt, *answer[:position]]
        row = replace(
            subject.row(0, tokens, params, seed=0),
            num_prompt=len(prompt),
            max_tokens=len(tokens) + 2,
            constraint=subject.constraint(answer[:position], params),
        )
        subject.plain.add(row)
        with subject.plain.watched():
            subject.plain.step()
        subject.plain.remove(0)
        assert np.allclose(
            found[position].numpy(), subject.plain.seen.probs[0, 0].numpy(), atol=1e-5
        )
    if params is BANNED:
        assert found[0][0] == found[1][0] == 0 < found[5][0], "by then it is long enough"
        assert found[2][9] == 0 < found[0][9]
    assert subject.target.kv.num_rows == 0


def test_bands_share_the_draws_evenly_and_leave_no_position_out() -> None:
    texts = [range(5, 805), range(9, 1000), range(4, 300)]
    *bands, whole = bands_of(texts, 400)
    assert (bands[0][0], bands[-1][1]) == whole == (4, 999)
    assert all(one[1] + 1 == other[0] for one, other in itertools.pairwise(bands))
    counts = [
        sum(len(range(max(text.start, first), min(text.stop, last + 1))) for text in texts)
        for first, last in bands
    ]
    assert len(counts) == BANDS
    assert max(counts) - min(counts) <= 2 * len(texts)
    assert min(counts) >= 400


def test_a_band_never_lacks_draws() -> None:
    """Catches bands that end within the draws of one position."""
    texts = [range(5, 605)] * 4
    counts = [4 * (last + 1 - first) for first, last in bands_of(texts, 599)]
    assert counts == [800, 800, 800, 2400]


def test_texts_that_end_early_make_fewer_bands() -> None:
    texts = [range(5, 105)] * 3
    assert [len(bands_of(texts, num)) for num in (60, 140, 300, 301)] == [5, 3, 1, 0]


def test_end_tokens_do_not_end_texts(open_subject: Open) -> None:
    """Otherwise a model that likes to stop would leave late positions untested."""
    subject = open_subject()
    draws = Draws(subject, PROMPTS[:2], WARM, 100, 0, Journal())
    drawn = draws.draw("speculative")
    limit = min(LATEST + len(PROMPTS[0]), subject.built.context)
    ends = {
        len(prompt) + len(text) for prompt, text in zip(drawn.prompts, drawn.texts, strict=True)
    }
    assert max(ends) == limit
    *parts, whole = (one.ranks.num_draws for one in draws.bands(drawn))
    assert sum(parts) == whole == drawn.num_tokens
    assert drawn.drafted.num_draws > 100
    assert subject.target.kv.num_rows == 0


def test_short_texts_are_as_many_as_draws(open_subject: Open, monkeypatch: Any) -> None:
    """A grammar may end a text after a token: then there are more of them, not fewer draws."""
    monkeypatch.setattr(sampled, "LATEST", 3)
    draws = Draws(open_subject(), PROMPTS, WARM, 30, 0, Journal())
    drawn = draws.draw("speculative")
    assert {len(text) for text in drawn.texts} == {3}
    assert 30 <= len(drawn.texts) <= 30 + sampled.MAX_ROWS
    assert drawn.prompts[:4] == PROMPTS, "prompts take turns"


@pytest.mark.slow
@pytest.mark.usefixtures("broken")
def test_a_rule_that_errs_only_at_late_positions_is_found_there(open_subject: Open) -> None:
    """The first band is sound; with the draft at hand its preference shows the bias."""
    subject = open_subject(verifier="resamples-late")
    draws = Draws(subject, PROMPTS, WARM, 1000, 0, Journal())
    drawn = draws.draw("speculative")
    *bands, _ = draws.bands(drawn)
    p_values = [dict(band.ranks.tests())["preference"].p_value for band in bands]
    assert p_values[0] > 1e-3
    assert bands[0].last < 300
    assert min(p_values[1:]) < 1e-5


@pytest.mark.slow
@short
def test_a_resumed_run_draws_what_is_missing_only(open_subject: Open, tmp_path: Any) -> None:
    """Finished units come from the journal, and the result is the same."""
    subject = open_subject()
    path = tmp_path / "journal"

    def run(journal: Journal) -> SampledDistribution:
        return Draws(subject, PROMPTS, WARM, 2000, 0, journal).section()

    whole = run(Journal.open(path, {}, resume=False))
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) > 2
    path.write_text("".join(lines[:2]))
    assert run(Journal.open(path, {}, resume=True)) == whole
    assert len(path.read_text().splitlines()) == len(lines)
