"""Rows of one batch under different verifiers: every row is decided as if it were alone, to the
bit.

Alone, every verifier has the exact distribution (tests/contract/test_exact_distribution.py), so in
company it has, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.build import Built, Options, build
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.parts import choose_parts
from outrider.rows import Row
from outrider.sampling.params import SamplingParams
from outrider.sampling.rng import KeyedStreams
from outrider.types import Draft
from outrider.verifiers import VERIFIERS
from outrider.verifiers.base import Verifier
from outrider.verifiers.batch import verdict_by_rule
from tests.helpers import (
    byte_tokenizer,
    disturbed,
    make_row,
    run_to_end,
    save_checkpoint,
    tiny_llama,
)

V = 7
N = 4
CHAIN_RULES = ("block", "gumbel", "token", "typical", "traversal")
TREE_RULES = ("traversal", "gumbel", "multi-round", "top-k")


def rule(name: str) -> Verifier:
    return VERIFIERS.load(name)()


def probs(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(*shape, V, generator=generator)).softmax(-1)


def drawn(draft_probs: Tensor, parents: list[int], seed: int) -> Tensor:
    """(N,) tokens, each drawn from its parent's distribution, siblings without replacement."""
    generator = torch.Generator().manual_seed(seed)
    tokens = []
    for node, parent in enumerate(parents):
        probs = draft_probs[parent + 1].clone()
        probs[[tokens[other] for other in range(node) if parents[other] == parent]] = 0
        tokens.append(int(torch.multinomial(probs, 1, generator=generator)))
    return torch.tensor(tokens)


def decided(verdict: Any, row: int) -> tuple:
    path, accepted, token, complete = (part[row] for part in verdict.lists)
    return path[:accepted], token, complete


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("trees", [False, True])
def test_a_row_is_decided_as_if_alone(seed: int, trees: bool) -> None:
    """Catches rows merged in another order, another row's coins, a neighbour's width or kind of
    draft that shows."""
    names = TREE_RULES if trees else CHAIN_RULES
    rules = [rule(name) for name in names] * 2
    num = len(rules)
    lengths = [(seed + 3 * row) % (N + 1) for row in range(num)]
    shapes = [[-1, 0, 1, 2], [-1, -1, 0, 0], [-1, 0, 0, 1]]
    parents = [shapes[(seed + row) % 3] if trees else shapes[0] for row in range(num)]
    target = probs(num, N + 1, seed=seed)
    own = probs(num, N + 1, seed=1000 + seed)
    tokens = torch.stack([drawn(own[row], parents[row], seed * 50 + row) for row in range(num)])
    was_drawn = [row % 3 != 1 and names[row % len(names)] != "gumbel" for row in range(num)]
    together = Draft(tokens, torch.tensor(lengths), torch.tensor(parents) if trees else None, own)
    together.sampled = torch.tensor(was_drawn)[:, None].expand(num, N)
    positions = torch.arange(5, 5 + num)
    found = verdict_by_rule(
        rules, together, target, KeyedStreams(list(range(num))), positions.tolist()
    )
    for row in range(num):
        length = lengths[row]
        is_chain = parents[row][:length] == list(range(-1, length - 1))
        alone = Draft(
            tokens[row : row + 1, :length],
            torch.tensor([length]),
            None if is_chain else torch.tensor([parents[row][:length]]),
            own[row : row + 1, : length + 1] if was_drawn[row] and length else None,
        )
        wanted = rules[row].verify(
            alone,
            target[row : row + 1, : length + 1],
            KeyedStreams([row]),
            positions[row : row + 1],
        )
        assert decided(found, row) == decided(wanted, 0), (
            f"row {row}, {rules[row].name}, {length} nodes"
        )


def test_one_rule_for_all_is_one_call() -> None:
    """Catches a batch cut into pieces where nothing asks for it: the cost of rows that share a
    verifier must stay one call."""

    class Counting(type(rule("block"))):  # type: ignore[misc]
        calls = 0

        def verify(self, *arguments: Any) -> Any:
            self.calls += 1
            return super().verify(*arguments)

    one = Counting()
    draft = Draft(
        torch.zeros(3, 2, dtype=torch.int64), torch.tensor([2, 0, 1]), probs=probs(3, 3, seed=1)
    )
    verdict_by_rule([one] * 3, draft, probs(3, 3, seed=2), KeyedStreams([1, 2, 3]), [4, 5, 6])
    assert one.calls == 1


# ---------------------------------------------------------------- whole texts

PROMPTS = ([40, 41, 42, 40, 41, 42, 40], [9, 8, 7, 6, 5], [100, 101, 100, 101, 100], [60, 61, 62])
SOFT = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    folder: Path = tmp_path_factory.mktemp("models")
    target = tiny_llama(257, sharpness=3.0)
    save_checkpoint(folder / "target", target, byte_tokenizer())
    save_checkpoint(folder / "draft", disturbed(target, 0.2), byte_tokenizer())
    threads = torch.get_num_threads()
    yield build(
        Options(
            target=str(folder / "target"),
            drafter="draft-model",
            draft=str(folder / "draft"),
            dtype="float32",
            threads=1,
        )
    )
    torch.set_num_threads(threads)


def mixed_rows(names: tuple[str, ...]) -> list[Row]:
    """A greedy row, then seeded ones, each under another rule."""
    rows = [make_row(PROMPTS[0], SamplingParams(max_tokens=20), number=0)]
    for number, name in enumerate(names, start=1):
        row = make_row(PROMPTS[number % len(PROMPTS)], SOFT, seed=number, number=number)
        row.verifier = rule(name)
        rows.append(row)
    return rows


def texts(built: Built, drafter: str, settings: dict[str, Any], rows: list[Row]) -> list[list[int]]:
    parts = choose_parts(drafter, settings, "auto", {}, 4, lossy=False)
    made = parts.make_drafter(built.target, built.draft)
    decoder = Decoder(built.target.lm, made, parts.make_verifier(), FixedLength(4))
    for row in rows:
        decoder.add(row)
    return [row.output for row in run_to_end(decoder)]


@pytest.mark.parametrize(
    ("drafter", "settings", "names"),
    [
        ("draft-model", {}, ("block", "gumbel", "typical", "token")),
        (
            "draft-model",
            {"tree": "2x2x1", "sample_from": 0.5},
            ("traversal", "gumbel", "multi-round"),
        ),
        ("draft-model", {"tree": "best-first"}, ("traversal", "gumbel", "top-k")),
        ("universal", {"method": "shared"}, ("block", "gumbel", "token")),
        ("ngram", {}, ("block", "gumbel")),
    ],
)
def test_a_text_does_not_show_its_neighbours_rules(
    built: Built, drafter: str, settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    """Catches a drafter that draws for a row as its neighbour's rule wants it, and distributions
    that are not those drawn from."""
    together = texts(built, drafter, settings, mixed_rows(names))
    for number, text in enumerate(together):
        assert texts(built, drafter, settings, [mixed_rows(names)[number]]) == [text], (
            f"row {number}"
        )


def test_a_coupled_row_has_the_plain_text_and_its_drafts_are_kept(built: Built) -> None:
    """Catches a coupled row whose drafter draws with other noise: right text, but hardly anything
    accepted."""
    rows = mixed_rows(("block", "gumbel"))
    texts(built, "draft-model", {}, rows)
    plain = mixed_rows(("block", "gumbel"))[2]
    assert texts(built, "none", {}, [plain]) == [rows[2].output]
    unaware = mixed_rows(("gumbel",))[1]
    unaware.tokens = list(rows[2].tokens[: rows[2].num_prompt])
    unaware.seed = rows[2].seed
    texts(built, "draft-model", {}, [unaware])
    assert unaware.output == rows[2].output
    assert rows[2].stats.accepted == unaware.stats.accepted, "as many as when all rows are coupled"
