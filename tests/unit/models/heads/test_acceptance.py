"""The acceptance head: its features by hand, its files, and that stopping by it keeps the
distribution."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from outrider.drafters.parallel import DistributionStop, draft_chain
from outrider.errors import CheckpointError, ConfigError
from outrider.models.heads.acceptance import (
    NUM_FEATURES,
    AcceptanceConfig,
    AcceptanceHead,
    DraftPositions,
    features,
)
from outrider.rows import Rows
from outrider.sampling.confidence import ConfidenceSettings, StopRule
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from outrider.verifiers import VERIFIERS
from tests import oracle
from tests.unit.drafters.enumerated import all_drafts
from tests.unit.drafters.test_parallel import EXACT, LEVELS, PROMPT, V, table

NO = torch.tensor([False])
ONE = torch.tensor([1])


def head(seed: int = 0, token_size: int = 0, scale: float = 1.0) -> AcceptanceHead:
    torch.manual_seed(seed)
    sizes = {"token_size": token_size, "vocab_size": V if token_size else 0}
    made = AcceptanceHead(
        AcceptanceConfig(hidden_size=8, num_layers=1, target="t", draft="d", **sizes)
    )
    for weight in made.parameters():
        weight.data.copy_(scale * torch.randn(weight.shape))
    return made.eval().requires_grad_(False)


def test_features_by_hand() -> None:
    """Catches features of another order, or ones that break on certainty and on small vocabularies."""
    positions = DraftPositions.of(torch.tensor([[0.5, 0.25, 0.25]]), ONE, torch.tensor([0.1]), NO)
    found = features(positions, ~NO)[0]
    assert found.shape == (NUM_FEATURES,)
    assert found[:3].tolist() == pytest.approx(
        [math.log(0.5) / 4, math.log(0.25) / 4, math.log(0.25) / 4]
    )
    assert found[-7:].tolist() == pytest.approx(
        [1.5 * math.log(2), 0.0, math.log(0.1), 0.0, 1.0, 0.0, 0.0]
    )
    behind = features(positions, ~NO, ONE)[0]
    assert behind[:-2].tolist() == found[:-2].tolist()
    assert behind[-2:].tolist() == pytest.approx([math.log(0.25), 1.0])
    certain = features(DraftPositions.of(torch.eye(50)[:1], ONE, torch.zeros(1), ~NO), NO)[0]
    assert torch.isfinite(certain).all()
    # of the first token, what came before says nothing
    assert certain[-7:].tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]


def test_tokens_by_hand() -> None:
    """Catches the table asked about the wrong token, and a mean over q that is not one. A head that
    adds up what it reads."""
    one = head(token_size=1)
    one.tokens.weight.copy_(torch.tensor([[1.0], [10.0], [100.0]]))
    one.enter = torch.nn.Identity()
    one.layers = torch.nn.ModuleList()
    one.leave = torch.nn.Linear(NUM_FEATURES + 2, 1, bias=False).requires_grad_(False)
    one.leave.weight.data = torch.tensor([[0.0] * NUM_FEATURES + [1.0, 2.0]])
    probs = torch.tensor([[0.5, 0.25, 0.25]])

    def estimate(previous: int, drawn: int | None, probs: torch.Tensor = probs) -> float:
        positions = DraftPositions.of(probs, torch.tensor([previous]), torch.tensor([0.1]), NO)
        return float(one(positions, NO, None if drawn is None else torch.tensor([drawn])))

    # SiLU keeps numbers this large, nearly
    assert estimate(1, 2) == pytest.approx(10 + 2 * 100, rel=1e-4)
    assert estimate(2, 1) == pytest.approx(100 + 2 * 10, rel=1e-4)
    assert estimate(2, None) == pytest.approx(100 + 2 * (0.5 + 2.5 + 25), rel=1e-4)
    wider = torch.tensor([[0.5, 0.0, 0.25, 0.25]])  # than the draft's table: the target's
    assert estimate(9, None, wider) == pytest.approx(100 + 2 * 25.5, rel=1e-4)


@pytest.mark.parametrize("token_size", [0, 2])
def test_saved_and_loaded(tmp_path: Path, token_size: int) -> None:
    one = head(token_size=token_size, scale=0.3)  # its estimates differ visibly from 0 and 1
    one.save(tmp_path)
    again = AcceptanceHead.load(tmp_path, V)
    assert again.config == one.config
    probs = torch.rand(4, V).softmax(-1)
    flags = torch.tensor([True, False, True, False])
    previous = torch.tensor([0, 0, 1, 2])
    estimate = one.chance(probs, previous, None, None, greedy=flags)
    assert torch.equal(again.chance(probs, previous, None, None, greedy=flags), estimate)
    assert not torch.equal(one.chance(probs, previous, None, None, greedy=~flags), estimate)
    assert torch.equal(one.chance(probs, 2 - previous, None, None, greedy=flags), estimate) == (
        token_size == 0
    )


def test_what_is_no_such_head_is_refused(tmp_path: Path) -> None:
    """Catches a table that is read with another model's numbers of tokens, and a config that ends
    in a traceback."""
    head(token_size=2).save(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"trained for draft model 'd' of 3 tokens, this one has 7"
    ):
        AcceptanceHead.load(tmp_path, 7)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "token_size": "two"}))
    with pytest.raises(CheckpointError, match="acceptance head can be made of its config"):
        AcceptanceHead.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "token_size": 1}))
    with pytest.raises(CheckpointError, match=r"tokens\.weight"):
        AcceptanceHead.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "medusa"}')
    with pytest.raises(CheckpointError, match="no acceptance head"):
        AcceptanceHead.load(tmp_path)
    with pytest.raises(CheckpointError, match="no head folder"):
        AcceptanceHead.load(tmp_path / "nowhere")


@pytest.mark.parametrize("ends", [(), (1,)])
@pytest.mark.parametrize("token_size", [0, 2])
@pytest.mark.parametrize("verifier", ["token", "block"])
def test_stopping_by_it_keeps_the_distribution(
    verifier: str, token_size: int, ends: tuple[int, ...]
) -> None:
    """Catches a rule that looks at the token it decides about; at thresholds where some chains stop
    and others do not."""
    guesses = table(1)
    params = SamplingParams(temperature=1.0)
    lengths = set()
    one = head(3, token_size)
    for stop_below in (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0):
        settings = ConfidenceSettings(
            stop="acceptance", stop_below=stop_below, acceptance_head="here"
        )

        def drafted(rows: Rows, settings: ConfidenceSettings = settings) -> Draft:
            predict = partial(one.chance, greedy=torch.zeros(len(rows), dtype=torch.bool))
            pending = torch.tensor([row.tokens[-1] for row in rows])
            rule = StopRule(
                settings, len(rows), rows.device, predict, pending=pending, ends=[ends] * len(rows)
            )
            return draft_chain(rows, [LEVELS] * len(rows), guesses, DistributionStop(rule))

        drafts = all_drafts(drafted, PROMPT, params, V)
        lengths.add(tuple(sorted(set(drafts.draft.lengths.tolist()))))
        target = oracle.TableModel.random(
            torch.Generator().manual_seed(3), V, LEVELS + 1, params, PROMPT
        )
        assert oracle.bias(VERIFIERS.load(verifier)().verify, target, drafts) < EXACT
    assert len(lengths) > 1, "no threshold stopped anything"


def test_rule_and_head_go_together() -> None:
    for settings in (
        {"stop": "acceptance"},
        {"acceptance_head": "x"},
        {"stop": "entropy", "acceptance_head": "x"},
    ):
        with pytest.raises(ConfigError, match="go together"):
            ConfidenceSettings(**settings)
