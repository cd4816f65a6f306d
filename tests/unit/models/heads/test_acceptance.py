"""The acceptance head: its features by hand, its files, and that stopping by it keeps the law."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from outrider.drafters.parallel import LawStop, draft_chain
from outrider.errors import CheckpointError, ConfigError
from outrider.models.heads.acceptance import NUM_FEATURES, AcceptanceConfig, AcceptanceHead, law_features
from outrider.rows import Rows
from outrider.sampling.confidence import ConfidenceSettings, StopRule
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from outrider.verifiers import VERIFIERS
from tests import oracle
from tests.unit.drafters.enumerated import all_drafts
from tests.unit.drafters.test_parallel import EXACT, LEVELS, PROMPT, V, table

NO = torch.tensor([False])


def head(seed: int = 0) -> AcceptanceHead:
    torch.manual_seed(seed)
    made = AcceptanceHead(AcceptanceConfig(hidden_size=8, num_layers=1, target="t", draft="d"))
    for weight in made.parameters():
        weight.data.copy_(torch.randn(weight.shape))
    return made.eval().requires_grad_(False)


def test_features_by_hand() -> None:
    """Catches features of another order, or ones that break on certainty and on small vocabularies."""
    found = law_features(torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([0.1]), NO, ~NO)[0]
    assert found.shape == (NUM_FEATURES,)
    assert found[:3].tolist() == pytest.approx([math.log(0.5) / 4, math.log(0.25) / 4, math.log(0.25) / 4])
    assert found[-7:].tolist() == pytest.approx([1.5 * math.log(2), 0.0, math.log(0.1), 0.0, 1.0, 0.0, 0.0])
    behind = law_features(torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([0.1]), NO, ~NO, torch.tensor([0.25]))[0]
    assert behind[:-2].tolist() == found[:-2].tolist()
    assert behind[-2:].tolist() == pytest.approx([math.log(0.25), 1.0])
    certain = law_features(torch.eye(50)[:1], torch.zeros(1), ~NO, NO)[0]
    assert torch.isfinite(certain).all()
    assert certain[-7:].tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]  # of the first token, what came before says nothing


def test_saved_and_loaded(tmp_path: Path) -> None:
    one = head()
    one.save(tmp_path)
    again = AcceptanceHead.load(tmp_path)
    assert again.config == one.config
    law = torch.rand(4, 9).softmax(-1)
    flags = torch.tensor([True, False, True, False])
    assert torch.equal(again.chance(law, None, None, flags), one.chance(law, None, None, flags))
    assert not torch.equal(one.chance(law, None, None, flags), one.chance(law, None, None, ~flags))
    (tmp_path / "config.json").write_text('{"model_type": "medusa"}')
    with pytest.raises(CheckpointError, match="no acceptance head"):
        AcceptanceHead.load(tmp_path)
    with pytest.raises(CheckpointError, match="no head folder"):
        AcceptanceHead.load(tmp_path / "nowhere")


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_stopping_by_it_keeps_the_law(verifier: str) -> None:
    """Catches a rule that looks at the token it decides about; at thresholds where some chains stop and others do not."""
    guesses, params, lengths = table(1), SamplingParams(temperature=1.0), set()
    one = head(3)
    for stop_below in (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0):
        settings = ConfidenceSettings(stop="acceptance", stop_below=stop_below, acceptance_head="here")

        def drafted(rows: Rows, settings: ConfidenceSettings = settings) -> Draft:
            greedy = torch.zeros(len(rows), dtype=torch.bool)
            rule = StopRule(settings, len(rows), rows.device, lambda law, before, drawn: one.chance(law, before, drawn, greedy))
            return draft_chain(rows, [LEVELS] * len(rows), guesses, LawStop(rule))

        drafts = all_drafts(drafted, PROMPT, params, V)
        lengths.add(tuple(sorted(set(drafts.draft.lengths.tolist()))))
        target = oracle.TableModel.random(torch.Generator().manual_seed(3), V, LEVELS + 1, params, PROMPT)
        assert oracle.bias(VERIFIERS.load(verifier)().verify, target, drafts) < EXACT
    assert len(lengths) > 1, "no threshold stopped anything"


def test_rule_and_head_go_together() -> None:
    for settings in ({"stop": "acceptance"}, {"acceptance_head": "x"}, {"stop": "entropy", "acceptance_head": "x"}):
        with pytest.raises(ConfigError, match="go together"):
            ConfidenceSettings(**settings)
