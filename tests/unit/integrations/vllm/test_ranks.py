"""Tensor parallelism with a drafter that would answer each rank otherwise: the first one drafts for
all."""

from __future__ import annotations

import sys
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from outrider.drafters import DRAFTERS
from outrider.drafters.base import Drafter, DraftSetup
from outrider.integrations.vllm import Proposer
from outrider.registry import Entry
from outrider.rows import Rows
from outrider.trees.token_tree import TokenTree, to_draft
from outrider.types import Draft
from tests.unit.integrations.vllm.scheduler import Runner, configuration, drafting_with


class Dice(Drafter):
    """Drafts by lot."""

    repeatable = False
    built: ClassVar[int] = 0

    @classmethod
    def build(cls, setup: DraftSetup) -> Drafter:
        Dice.built += 1
        return cls()

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        trees = [TokenTree() for _ in rows]
        for tree, count in zip(trees, gamma, strict=True):
            tree.add_path([Random().randrange(40) for _ in range(count)], count)
        return to_draft(trees, rows.device)


class Channel:
    """A group whose first rank speaks before the others listen."""

    def __init__(self) -> None:
        self.sent: Any = None

    def broadcast_object(self, obj: Any, src: int) -> Any:
        assert src == 0
        if obj is not None:
            self.sent = obj
        return self.sent


def test_one_rank_drafts_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm.distributed")
    channel = Channel()
    module.get_tp_group = lambda: channel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.distributed", module)
    monkeypatch.setitem(DRAFTERS._builtin, "dice", Entry(f"{__name__}:Dice", "by lot"))
    monkeypatch.setattr(sys.modules[__name__].Dice, "built", 0)
    proposers = []
    for rank in range(3):
        config = configuration(4, drafting_with("dice"))
        config.parallel_config = SimpleNamespace(rank=rank, tensor_parallel_size=3)
        proposers.append(Proposer(config))
    assert Dice.built == 1
    runner = Runner(proposers)  # which compares the ranks' answers
    for number in range(4):
        runner.join([number, 2, 3], 30)
    while runner.rows:
        runner.step()
    assert runner.drafted > 100


def test_look_ups_need_no_channel() -> None:
    """They agree by themselves; nothing of vLLM is imported."""
    config = configuration(4, drafting_with("suffix"))
    config.parallel_config = SimpleNamespace(rank=1, tensor_parallel_size=2)
    runner = Runner([Proposer(config)])
    runner.join([1, 2, 3], 30)
    while runner.rows:
        runner.step()
    assert "vllm.distributed" not in sys.modules
