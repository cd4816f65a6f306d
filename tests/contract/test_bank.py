"""The bank of enumerated cases: silent about sound verifiers, loud about every injected fault."""

from __future__ import annotations

import pytest
from torch import Tensor

from outrider.sampling import traversal, tree
from outrider.sampling.rng import Randomness
from outrider.types import Draft, Verdict
from outrider.verifiers import VERIFIERS
from outrider.verifiers.base import Verifier
from tests.contract.test_mutations import VERIFY_BUGS, keyed_by_position, small_pair
from tests.contract.test_mutations_trees import CertainSiblings, ForgetsTheMass, ForgetsTheSibling
from tests.enumeration.bank import CaseFound, bank, failures, run_bank
from tests.oracle import Verify, interval_joint, total_variation
from tests.unit.lab.certify import broken

LONG = ("traversal", "gumbel")  # trees of every shape, or every value of a number drawn: seconds


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LONG else ())
        for name in VERIFIERS.names()
        if VERIFIERS.load(name).lossless
    ],
)
def test_sound_verifiers_pass(name: str) -> None:
    """A bank that accuses the innocent is switched off."""
    verifier = VERIFIERS.load(name)()
    found = run_bank(verifier, trees=verifier.shape == "tree")
    assert failures(found) == []
    assert max(one.total_variation for one in found) < 1e-12


def test_cases_have_names_of_their_own() -> None:
    """A failure is found by its case's name."""
    names = [case.name for case in bank(trees=True)]
    assert len(set(names)) == len(names)
    assert len(names) > 100


class Wrapped(Verifier):
    """A bare `verify` function as a verifier."""

    name = "wrapped"
    lossless = True

    def __init__(self, rule: Verify) -> None:
        self._rule = rule

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        if draft.probs is None or draft.num_nodes == 0:  # the injected rules know drawn drafts only
            return VERIFIERS.load("token")().verify(draft, target_probs, rng, positions)
        return self._rule(draft, target_probs, rng, positions)


@pytest.mark.parametrize("rule", [rule for rule, _ in VERIFY_BUGS], ids=lambda rule: rule.__name__)
def test_every_known_bug_of_chains_is_seen(rule: Verify) -> None:
    """The mutations of test_mutations.py, through the bank."""
    found = failures(run_bank(Wrapped(rule)))
    assert found
    assert found[0].total_variation is None or found[0].total_variation > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("traversal", ForgetsTheMass),
        ("traversal", ForgetsTheSibling),
        ("multi-round", CertainSiblings),
    ],
)
def test_known_bugs_of_trees_are_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: type[tree.Residuals]
) -> None:
    """They show on trees only, so the bank must have trees."""
    monkeypatch.setattr(tree, "Residuals", fault)
    monkeypatch.setattr(traversal, "Residuals", fault)
    assert failures(run_bank(VERIFIERS.load(name)(), trees=True))


@pytest.mark.parametrize(
    "verifier", [broken.ResamplesFromTarget(), broken.DropsUnlikely(), broken.OwnDice()]
)
def test_faulty_third_parties_fail(verifier: Verifier) -> None:
    assert failures(run_bank(verifier))


def test_numbers_used_twice_are_seen() -> None:
    """Each step of this one is exact; only two of them in a row are not. By how much follows from
    the sound verifier, where the enumeration, not the verifier, takes a step's coin for the next
    one's: 0.0049, as docs/decisions/009 says."""
    [found] = failures(run_bank(broken.KeyedByPosition()))
    assert found.name == "two steps in a row"
    target, drafter = small_pair()
    joint = interval_joint(
        VERIFIERS.load("block")().verify, target, drafter, 2, keyed_by_position, num_steps=2
    )
    reused = total_variation(joint, target.joint(3))
    assert found.total_variation == pytest.approx(reused, abs=1e-12)
    assert round(reused, 4) == 0.0049


def test_a_verifier_that_raises_has_failed() -> None:
    """With its message, and without ending the other cases."""
    found = run_bank(broken.RaisesOnMixed())
    assert {one.problem for one in failures(found)} == {"IndexError: no such node"}
    assert {one.kind for one in failures(found)} == {"chain: drawn and placed"}


def test_exact_on_small_vocabularies_passes_here() -> None:
    """What the bank cannot see is for the sampled distribution of a certificate to find."""
    assert failures(run_bank(broken.ClipsRare())) == []


@pytest.mark.parametrize("name", ["typical", "top-k"])
def test_lossy_verifiers_are_seen(name: str) -> None:
    assert max(one.total_variation for one in run_bank(VERIFIERS.load(name)())) > 0.1


def test_no_number_is_no_pass() -> None:
    """NaN compares false with everything."""
    assert failures([CaseFound("k", "n", float("nan"))])
