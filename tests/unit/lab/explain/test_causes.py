"""Every token lost has a cause: parts add up to the last digit, and constructions with a known
cause name it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from outrider.lab.explain.causes import CAUSES, Account, account
from outrider.lab.explain.distributions import Distributions, forced_distributions
from outrider.lab.runner import Step
from outrider.sampling.params import SamplingParams
from outrider.verifiers import VERIFIERS
from tests.enumeration.enumerate import emitted_tokens, enumerate_step, target_pass
from tests.enumeration.tables import Path as Tokens
from tests.enumeration.tables import TableModel, sampled_drafts
from tests.helpers import disturbed, tiny_llama
from tests.oracle import bias
from tests.unit.lab.explain.pairs import PROMPTS, contender_of, finished, save_pair

GREEDY = SamplingParams(max_tokens=50)
WARM = SamplingParams(max_tokens=50, temperature=1.0, seed=3)
FILTERED = SamplingParams(max_tokens=50, temperature=1.0, top_p=0.8, seed=3)
UNIFORM = np.full(4, 0.25)


def point(
    token: int, p: Sequence[float] = UNIFORM, q: Sequence[float] | None = None, **facts: object
) -> Distributions:
    """One position; `p_open`, `q_open`, `outside` and `guess` as given."""
    target = np.array(p)
    draft = None if q is None else np.array(q)
    given = {"p_open": target, "q_open": draft, "outside": None, "guess": None, **facts}
    return Distributions(
        token, target, draft, q_best=None if draft is None else int(draft.argmax()), **given
    )  # type: ignore[arg-type]


def step(
    tokens: list[int],
    path: list[int],
    *,
    parents: list[int] | None = None,
    asked: int | None = None,
    start: int = 0,
    drawn: bool = True,
) -> Step:
    """A step that kept `path` and added token 1."""
    sampled = [drawn] * len(tokens)
    taken = len(path) + 1
    return Step(
        start,
        len(tokens) if asked is None else asked,
        tokens,
        parents,
        sampled,
        path,
        1,
        False,
        taken,
        1,
        0.0,
        0.0,
    )


def text_of(steps: list[Step], points: list[Distributions], more: int = 0) -> Account:
    """The account, after which `more` plain steps follow."""
    end = steps[-1].start + steps[-1].taken
    plain = [step([], [], start=end + number, asked=0) for number in range(more)]
    return account([*steps, *plain], [*points, *(point(0) for _ in range(more))], is_greedy=False)


# ------------------------------------------------ constructions with a known cause


def test_a_token_that_the_draft_cannot_say() -> None:
    """And the same rejection where it can."""
    outside = np.array([False, True, False, True])
    for where, cause in ((outside, "vocabulary"), (None, "draft")):
        found = text_of(
            [step([2, 0, 0], [])], [point(1, q=[0.6, 0, 0.4, 0], outside=where)], more=9
        )
        assert found.places[0].lost == {cause: 3}


@pytest.mark.parametrize(
    ("p", "q", "cause"),
    [
        ([0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], "filters"),  # q's filter cut token 1
        (
            [0.5, 0.5, 0, 0],
            [0.4, 0.3, 0.3, 0],
            "filters",
        ),  # p's filter cut token 2, which was drafted
        ([0.5, 0.3, 0.2, 0], [0.4, 0.3, 0.3, 0], "draft"),
    ],
)
def test_what_filters_cut(p: list[float], q: list[float], cause: str) -> None:
    found = text_of([step([2, 0], [])], [point(1, p, q, p_open=UNIFORM, q_open=UNIFORM)], more=9)
    assert found.places[0].lost == {cause: 2}


def test_the_next_favourite_of_a_tree() -> None:
    """One sibling more would have been it; a chain has no siblings, and the third favourite is the
    draft's fault."""
    for favourite, parents, cause in (
        (1, [-1], "tree-budget"),
        (3, [-1], "draft"),
        (1, None, "draft"),
    ):
        q = np.array([0.1, 0.05, 0.5, 0.05])
        q[favourite] += 0.3
        found = text_of([step([2], [], parents=parents)], [point(1, q=list(q))], more=9)
        assert found.places[0].lost == {cause: 1}, favourite


def test_a_path_that_ends_in_the_middle_of_a_tree() -> None:
    """The first child is a leaf, the second has a child: keeping the leaf loses the level that the
    tree has elsewhere."""
    guessed = [point(1, q=UNIFORM, guess=1), point(1, q=UNIFORM, guess=1)]
    found = text_of([step([1, 0, 2], [0], parents=[-1, -1, 1])], guessed, more=9)
    assert found.ideal == 3 + 9
    assert found.places[1].lost == {"tree-budget": 1, "draft": 0}


@pytest.mark.parametrize(("guesses", "right"), [([1, 1, 1], 3), ([1, 0, 1], 1), ([0, 1, 1], 0)])
def test_what_a_stop_cost_is_read_off_the_text_after_it(guesses: list[int], right: int) -> None:
    """As many of the missing guesses as would have been right; the rest is the draft's."""
    steps = [step([], [], asked=3), *(step([], [], asked=0, start=n) for n in range(1, 9))]
    points = [point(1, q=UNIFORM, guess=guess) for guess in [*guesses, *[0] * 6]]
    lost = account(steps, points, is_greedy=True).places[0].lost
    assert lost == {"stopped": right, "draft": 3 - right}


def test_where_the_draft_is_not_known_all_is_charged_to_the_stop() -> None:
    assert text_of([step([], [], asked=3)], [point(1)], more=9).places[0].lost == {
        "stopped": 3,
        "draft": 0,
    }


@pytest.mark.parametrize(
    ("guess", "drawn", "gain"),
    [(1, True, 1.0), (0, True, 0.0), (None, True, 0.4), (None, False, 0.0)],
)
def test_the_next_token_of_a_draft_kept_whole(guess: int | None, drawn: bool, gain: float) -> None:
    """A known guess, a draw from q given the text (q / p), or the favourite of a drafter that does
    not draw."""
    after = point(1, [0.2, 0.5, 0.2, 0.1], [0.6, 0.2, 0.1, 0.1], guess=guess)
    found = text_of(
        [step([0, 2], [0, 1], drawn=drawn)],
        [point(0, q=UNIFORM), point(2, q=UNIFORM), after],
        more=9,
    )
    assert sum(found.places[2].lost.values()) == pytest.approx(gain)
    assert found.ideal == pytest.approx(
        3 + gain + 9 + sum(sum(place.lost.values()) for place in found.places[3:])
    )


def test_the_last_step_of_a_text_could_not_have_done_more() -> None:
    found = text_of([step([0, 2, 3], [0])], [point(0, q=UNIFORM), point(1, q=UNIFORM)])
    assert (found.ideal, found.places[1].lost) == (2, {})


@pytest.mark.parametrize("seed", [0, 5])
def test_chances_given_the_text_are_those_of_the_token_rule(seed: int) -> None:
    """P(at least i kept and the text begins with y) / P(the text begins with y), by enumerating
    every outcome of one step."""
    target, draft = tables(seed)
    proposals = sampled_drafts(draft, 3)
    verify = VERIFIERS.load("token")().verify
    assert bias(verify, target, proposals) < 1e-12
    outcomes = enumerate_step(verify, proposals, target_pass(target, proposals))
    joint: dict[Tokens, float] = {}  # (y_1 .. y_i) -> P(at least i kept, and they are these)
    counts = outcomes.verdict.lists.num_accepted
    for row, text in enumerate(emitted_tokens(outcomes, proposals)):
        for length in range(1, counts[row] + 1):
            joint[text[:length]] = joint.get(text[:length], 0.0) + float(outcomes.weights[row])
    for text in itertools.product(range(3), repeat=3):
        points = [
            point(token, target.probs(text[:n]).tolist(), draft.probs(text[:n]).tolist())
            for n, token in enumerate(text)
        ]
        steps = [
            step([0], [], start=0),
            step([], [], start=1, asked=0),
            step([], [], start=2, asked=0),
        ]
        places = account(steps, points, is_greedy=False).places
        chance = np.cumprod([place.p_token for place in places])
        given = [joint.get(text[:length], 0.0) / chance[length - 1] for length in (1, 2, 3)]
        np.testing.assert_allclose(np.cumprod([place.keeps for place in places]), given, atol=1e-9)


def tables(seed: int) -> tuple[TableModel, TableModel]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    target, draft = (
        TableModel.random(generator, 3, 4, SamplingParams(temperature=1.0), [1]) for _ in range(2)
    )
    for path, logits in draft.logits.items():  # neither alike nor strangers
        draft.logits[path] = 0.5 * logits + target.logits[path]
    return target, draft


# ------------------------------------------------ real runs


def explained(
    pair: tuple[str, str],
    configuration: str,
    params: SamplingParams,
    prompt: list[int] = PROMPTS[0],
) -> tuple[Account, list[Step]]:
    contender = contender_of(pair, configuration)
    trace = contender.run([prompt], params)[0]
    decoder = contender.built.decoder
    forced = forced_distributions(
        decoder.target, decoder.drafter, finished(contender, trace, params)
    )
    return account(trace.steps, forced, is_greedy=params.is_greedy), trace.steps


def sums(found: Account) -> dict[str, float]:
    return {cause: sum(place.lost.get(cause, 0.0) for place in found.places) for cause in CAUSES}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("pair"))


RUNS = [
    ("draft-model k=4", GREEDY), ("draft-model k=4", WARM), ("draft-model k=4 verifier=token", FILTERED),
    ("draft-model k=5 stop=entropy stop_below=0.5", WARM), ("draft-model k=6 tree=2x2", GREEDY),
    ("draft-model k=6 tree=2x2", WARM), ("draft-model k=6 tree=parallel:2 verifier=multi-round", FILTERED),
    ("draft-model k=8 tree=best-first", GREEDY), ("draft-model k=4 verifier=gumbel", WARM), ("ngram k=4", WARM),
    ("suffix k=6", GREEDY), ("draft-model k=auto:4", WARM), ("composite k=6 parts=draft-model+suffix", WARM),
    ("composite k=6 parts=draft-model+suffix verifier=gumbel", WARM),
]  # fmt: skip


@pytest.mark.parametrize(
    ("configuration", "params"), RUNS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_parts_add_up(pair: tuple[str, str], configuration: str, params: SamplingParams) -> None:
    """Ideal less realised, to rounding, whatever drafts and verifies; nothing is negative."""
    found, steps = explained(pair, configuration, params)
    taken = sum(step.taken for step in steps)
    assert taken == len(found.places)
    assert sum(sums(found).values()) == pytest.approx(found.ideal - taken, abs=1e-8)
    assert all(tokens >= -1e-9 for place in found.places for tokens in place.lost.values())
    assert sum(place.is_kept for place in found.places) == sum(
        min(len(step.path), step.taken) for step in steps
    )
    if params is not FILTERED:
        assert sums(found)["filters"] == 0


@pytest.mark.slow
def test_a_draft_that_is_the_target_loses_nothing(tmp_path: Path) -> None:
    """But for the length: one more token would always have been kept."""
    pair = save_pair(tmp_path, draft=disturbed(tiny_llama(257, sharpness=2.0), 0.0))
    for params in (GREEDY, WARM):
        found, steps = explained(pair, "draft-model k=3", params)
        parts = sums(found)
        # the last step ends the text
        assert parts.pop("length") == pytest.approx(len(steps) - 1, abs=0.01)
        assert max(parts.values()) == 0


@pytest.mark.slow
def test_words_that_a_narrow_draft_lacks(tmp_path: Path) -> None:
    """A greedy rejection is the vocabulary's exactly where the text's token is outside of it."""
    pair = save_pair(tmp_path, draft=tiny_llama(170, sharpness=2.0))
    found, _ = explained(pair, "draft-model k=3", GREEDY, [5, 80, 33, 7])
    rejections = [place for place in found.places if place.is_rejection and place.lost]
    assert any(place.token >= 170 for place in rejections)
    assert all(
        place.cause == ("vocabulary" if place.token >= 170 else "draft") for place in rejections
    )


def test_a_stop_rule_is_named(pair: tuple[str, str]) -> None:
    """A threshold of 1 never lets it draft: what is lost goes to the stop, less what the draft
    would not have got."""
    found, _ = explained(pair, "draft-model k=4 stop=entropy stop_below=1.0", GREEDY)
    parts = sums(found)
    assert parts["stopped"] > 0
    assert parts["stopped"] + parts["draft"] == pytest.approx(found.ideal - len(found.places))


@pytest.mark.slow
def test_a_tiny_tree_budget_is_named(tmp_path: Path) -> None:
    """One sibling more would have been it: exactly where the text's token is the draft's next
    favourite."""
    found, _ = explained(
        save_pair(tmp_path, noise=0.3), "draft-model k=2 tree=2", SamplingParams(max_tokens=80)
    )
    rejections = [place for place in found.places if place.is_rejection and place.lost]
    assert any(place.rank_token == 3 for place in rejections)
    assert all((place.cause == "tree-budget") == (place.rank_token == 3) for place in rejections)


def test_filters_are_named(pair: tuple[str, str]) -> None:
    assert sums(explained(pair, "draft-model k=4", FILTERED)[0])["filters"] > 0
