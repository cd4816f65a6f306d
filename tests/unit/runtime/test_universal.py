"""A draft with another tokenizer on the native runtime: whole chains, against the same passes token
by token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.base import DraftSetup
from outrider.drafters.model.universal import UniversalDrafter, UniversalSettings
from outrider.models.lm import LM
from outrider.models.loaded import LoadedModel
from outrider.models.loading.load import build_lm
from outrider.models.loading.read_card import card_of
from outrider.models.tokens.alignment import TokenizerPair
from outrider.rows import Row, Rows
from outrider.runtime.lower import lower
from outrider.runtime.run import NativeRun
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.coupled import CoupledVerifier
from tests.helpers import make_row, run_to_end, tiny_llama
from tests.subword import byte_level_bpe

CPU = torch.device("cpu")
NODES = 4
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
PARAMS = (
    GREEDY,
    replace(GREEDY, temperature=0.8),
    replace(GREEDY, max_tokens=9, top_p=0.9, temperature=1.0),
    GREEDY,
)
RACING = 3  # whose verifier shares its noise
PROMPTS = (
    "the sea and the fox",
    "1, 2, 3, 1, 2, 3, 1",
    "numbers return: ",
    "shells and shells and",
)


class Stepwise:
    """The passes of a native run, that is none to the drafter."""

    def __init__(self, run: NativeRun) -> None:
        self._run = run

    def __call__(self, *of: Any) -> Tensor:
        return self._run(*of)

    def with_hidden(self, *of: Any) -> tuple[Tensor, list[Tensor]]:
        return self._run.with_hidden(*of)


def pair(path: Path) -> tuple[LoadedModel, LoadedModel]:
    """A target, and on the native runtime what it would say in other tokens: its weights, where
    both have a token."""
    ours = byte_level_bpe(330)
    theirs = byte_level_bpe(
        400, end="<eos>", text="the sea and the fox: numbers return 1, 2, 3\n" * 9
    )
    target = tiny_llama(len(ours), sharpness=3.0)
    draft = tiny_llama(len(theirs), seed=1)
    shared = TokenizerPair(ours, theirs, len(ours), len(theirs)).to_draft
    own = target.state_dict()
    moved = draft.state_dict()
    for name, weight in own.items():
        if weight.shape == moved[name].shape:
            moved[name] = weight
        else:
            moved[name][list(shared.values())] = weight[list(shared)]
    draft.load_state_dict(moved)
    lms = [build_lm(module, "tiny", torch.float32, CPU) for module in (target, draft)]
    lms[1] = LM(NativeRun(lms[1], draft, lower(draft), path), lms[1].shape, lms[1].dtype, CPU)
    (lm, other) = lms
    ends = frozenset[int]()
    loaded = LoadedModel("target", lm, card_of(target.config), ours, ends)
    return loaded, LoadedModel("draft", other, card_of(draft.config), theirs, ends)


class Heard(UniversalDrafter):
    """Writes down what it proposes: the tokens of each row."""

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        draft = super().propose(rows, gamma)
        self.heard = getattr(self, "heard", [])
        self.heard.append([tokens[:length] for tokens, length in zip(*draft.lists, strict=True)])
        return draft


def texts(
    target: LoadedModel, draft: LoadedModel, method: str
) -> tuple[list[Row], list[list[list[int]]]]:
    target.lm.kv.lengths.clear()
    drafter = Heard.build(DraftSetup(target, draft, NODES, UniversalSettings(method)))  # type: ignore[arg-type]
    assert isinstance(drafter, Heard)
    decoder = Decoder(target.lm, drafter, BlockVerifier(), FixedLength(NODES))
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        row = make_row(target.tokenizer(prompt)["input_ids"], params, seed=number, number=number)
        row.verifier = CoupledVerifier() if number == RACING else None
        decoder.add(row)
        decoder.step()  # one after the other, so that they lack different numbers of tokens
    return run_to_end(decoder), drafter.heard


@pytest.mark.parametrize("method", ["shared", "reencode"])
def test_whole_chains_are_those_token_by_token(
    method: str, library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a token that is fed by its target's id, one that the draft lacks, and a cache that
    holds what was not emitted."""
    target, draft = pair(library_path)
    calls: list[int] = []
    whole = UniversalDrafter._chains

    def counted(self: UniversalDrafter, *of: Any) -> Any:
        calls.append(1)
        return whole(self, *of)

    monkeypatch.setattr(UniversalDrafter, "_chains", counted)
    found, proposed = texts(target, draft, method)
    assert len(calls) > 10
    slow = replace(draft, lm=LM(Stepwise(draft.lm.run), draft.lm.shape, draft.lm.dtype, CPU))  # type: ignore[arg-type]
    expected, slowly = texts(target, slow, method)
    assert [(row.output, row.origins) for row in found] == [
        (row.output, row.origins) for row in expected
    ]
    assert proposed == slowly
    assert sum(len(tokens) == NODES for step in proposed for tokens in step) > 20
    assert any("accepted" in row.origins for row in found)
