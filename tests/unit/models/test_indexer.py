"""Sparse attention on our cache: what an indexer chooses, beside transformers' code, and what every
mistake would show."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v32 import modeling_deepseek_v32

from outrider.kv import KVCache, LayerShape
from outrider.models import attention
from outrider.models.indexer import CHOOSE, Scores, indexer_layers
from outrider.models.lm import LM, PassLimits
from outrider.models.loading.load import build_lm
from outrider.models.loading.older_code import hand_over
from outrider.models.loading.unsupported import OwnCacheNeededError, refuse_other_caches
from outrider.models.pass_plan import following
from outrider.models.plan import plan_pass
from outrider.models.probes.probe import probe_tokens
from outrider.models.stateful.lm import StateLM
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.gpu import run as device_run
from outrider.runtime.lower import lower
from outrider.runtime.ops import Code, Op, Program, Value, View
from outrider.runtime.run import Executor, NativeRun
from tests.unit.runtime.families import FAMILIES, SIZES

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = 1e-4  # of the logits' range, in fp32
# of the choice that is made by itself
COUNT = 6
HEADS = 3
SIZE = 16
PARENTS = [-1, -1, 0, 1, 2, 1, 4]
# to each column of that tree
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5], [0, 2, 6], [0, 1, 3, 5, 7]]


def model(family: str = "deepseek_v32", **changes: Any) -> Any:
    """transformers' own, without anything of ours."""
    config = AutoConfig.for_model(
        family, **{**SIZES, **copy.deepcopy(FAMILIES[family]), "index_topk": COUNT, **changes}
    )
    torch.manual_seed(0)
    return (
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    )


def on_our_cache(
    module: Any, path: Path | None, change: Callable[[Program], None] = lambda program: None
) -> LM:
    """On the executor at `path`, its program changed; None: on torch's modules."""
    with torch.inference_mode(False):
        lm = build_lm(module, "tiny", torch.float32, CPU)
        assert not isinstance(lm, StateLM)
        if path is not None:
            program = lower(module)
            change(program)
            lm.run = NativeRun(lm, module, program, path)
            lm.limits = PassLimits(granularity=1)
    return lm


def worst(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


# ---------------------------------------------------------------- beside transformers' code


@pytest.mark.parametrize("runtime", ["eager", "native"])
@pytest.mark.parametrize("family", ["axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"])
@torch.inference_mode()
def test_logits_are_those_of_transformers(family: str, runtime: str, library_path: Path) -> None:
    """Catches a head's weight that is lost, keys rotated otherwise, and a row that reads its
    neighbour's choice or keys."""
    tokens = probe_tokens(SIZES["vocab_size"], 700, CPU)[0].tolist()
    texts = [tokens[:3], tokens[5:45], tokens[45:645]]
    drafts = [tokens[640:646], tokens[650:656], tokens[660:666]]
    with torch.inference_mode(False):
        plain = model(family)
        dense = model(family, index_topk=2048)
        lm = on_our_cache(model(family), library_path if runtime == "native" else None)
    for _ in texts:
        lm.kv.add_row()
    lm.catch_up(texts)
    ours = lm.forward(
        torch.tensor([[text[-1], *draft] for text, draft in zip(texts, drafts, strict=True)])
    ).logits
    for row, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
        ids = torch.tensor([text + draft])
        theirs = plain(ids, use_cache=False).logits[0, -7:]
        assert worst(ours[row], theirs) < TOLERANCE
        if row:
            assert worst(dense(ids, use_cache=False).logits[0, -7:], theirs) > 100 * TOLERANCE, (
                "the choice hides nothing"
            )


@torch.inference_mode()
def test_where_nothing_is_left_out_it_is_dense_attention(library_path: Path) -> None:
    """To the bit, in passes of any cut and beside tokens from which something is hidden."""
    tokens = probe_tokens(SIZES["vocab_size"], 80, CPU)
    with torch.inference_mode(False):
        cut, dense = (on_our_cache(model(index_topk=count), library_path) for count in (70, 2048))
    found = []
    for lm in (cut, dense):
        lm.kv.add_row()
        parts = [lm.forward(tokens).logits]
        for start, width in ((0, 30), (30, 35), (65, 9)):
            parts.append(lm.forward(tokens[:, start : start + width]).logits)
            lm.kv.advance(0, width)
        found.append(parts)
    for ours, all_seen in zip(*found, strict=True):
        num_equal = (ours == all_seen).all(-1)[0].tolist()
        start = 65 if len(num_equal) == 9 else 0
        assert all(num_equal[: 70 - start])
        assert not any(num_equal[70 - start :])


# ---------------------------------------------------------------- the choice by itself


def expected_choice(
    query: Tensor, keys: Tensor, weights: Tensor, paths: list[list[int]], prefix: int
) -> list[list[int]]:
    """Places that each token chooses, in fp64: of equal scores the first on its path."""
    found = []
    for token, path in enumerate(paths):
        places = [*range(prefix), *(prefix + column for column in path)]
        products = torch.relu(query[token].double() @ keys[places].double().T * 0.25)
        scores = weights[token].double() @ products
        order = sorted(range(len(places)), key=lambda index: (-scores[index].item(), index))
        found.append([places[index] for index in sorted(order[:COUNT])])
    return found


def native_choice(
    kv: KVCache, query: Tensor, key: Tensor, weights: Tensor, parents: Tensor | None, path: Path
) -> Tensor:
    """(tokens, COUNT) positions that the executor chooses in one pass behind what the cache holds."""
    sizes = (HEADS * SIZE, SIZE, HEADS, COUNT, COUNT)
    dtypes = (kv.dtype, kv.dtype, *[torch.float32] * 3)
    flat = [View(number, 1, size, 0, size) for number, size in enumerate(sizes)]
    program = Program(
        values=[Value(size, dtype) for size, dtype in zip(sizes, dtypes, strict=True)],
        body=[
            *(Op(Code.EMBED, (), flat[number], weight=name) for number, name in enumerate("qkw")),
            Op(Code.STORE, (flat[1],), None),
            Op(
                Code.CHOICE,
                (View(0, HEADS, SIZE, 0, SIZE), flat[2]),
                flat[3],
                heads=HEADS,
                scale=0.25,
            ),
        ],
        head=[Op(Code.GATHER, (flat[3],), flat[4])],
        logits=flat[4],
    )
    tables = {"q": query.flatten(1), "k": key, "w": weights}
    executor = Executor(program, tables, kv.layers, kv.dtype, path)
    width = len(query)
    plan, positions = plan_pass(kv, 1, width, parents, last_position=1 << 20)
    return executor.run(torch.arange(width)[None], positions, plan, torch.arange(width))[0][0]


@pytest.mark.parametrize("values", ["whole", "random"])
@pytest.mark.parametrize("runtime", ["eager", "native"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_the_best_are_chosen(
    dtype: torch.dtype, runtime: str, values: str, library_path: Path
) -> None:
    """Catches a position that is left out at the end of a range, span or path, and another rule
    among equals, which most scores of whole numbers are."""
    shape = LayerShape(1, SIZE, 0, is_indexer=True)
    dice = torch.Generator().manual_seed(0)

    def some(*sizes: int) -> Tensor:
        if values == "random":
            return torch.randn(*sizes, generator=dice).to(dtype)
        return torch.randint(-1, 2, sizes, generator=dice).to(dtype)

    for prefix, width in ((0, 1), (3, 7), (60, 8), (63, 2), (511, 7), (1300, 40), (1030, 1)):
        kv = KVCache([shape], dtype, CPU)
        kv.add_row()
        kv.reserve(1, prefix + width)
        kv.lengths[0] = prefix
        kv.keys[0][0, :prefix, 0] = some(prefix, SIZE)
        query = some(width, HEADS, SIZE)
        key = some(width, SIZE)
        weights = some(width, HEADS).float()
        keys = torch.cat([kv.keys[0][0, :prefix, 0], key])
        for parents in (None, *([torch.tensor([PARENTS])] if width == len(PATHS) else [])):
            paths = [[*range(token + 1)] for token in range(width)] if parents is None else PATHS
            expected = expected_choice(query, keys, weights, paths, prefix)
            if runtime == "native":
                positions = (
                    native_choice(kv, query, key, weights, parents, library_path).long().tolist()
                )
                found = []
                for path, own in zip(paths, positions, strict=True):
                    places = [*range(prefix), *(prefix + column for column in path)]
                    found.append([places[position] for position in own[: len(places)]])
            else:
                plan, _ = plan_pass(kv, 1, width, parents, last_position=1 << 20)
                with following(plan):
                    chosen = attention.choose(
                        0, Scores(query[None], key[None], weights[None], 0.25, COUNT)
                    )[0]
                found = [
                    sorted(own[: prefix + len(path)].tolist())
                    for path, own in zip(paths, chosen, strict=True)
                ]
            assert found == expected


# ---------------------------------------------------------------- mistakes


def keep_and_leave(
    kv: KVCache, row: int, path: list[int], plain: Callable[[KVCache, int, list[int]], None]
) -> None:
    """A tree's path is kept, the keys of indexers as they lay."""
    before = [
        store.clone() for store, shape in zip(kv.keys, kv.layers, strict=True) if shape.is_indexer
    ]
    plain(kv, row, path)
    for store, shape in zip(kv.keys, kv.layers, strict=True):
        if shape.is_indexer:
            store.copy_(before.pop(0))


def behind_a_tree(lm: LM, reference: Any) -> float:
    """How far the logits behind a kept path of a tree are from transformers' own, in a row that
    takes another one's place."""
    tokens = probe_tokens(SIZES["vocab_size"], 60, CPU)[0].tolist()
    texts = [tokens[:9], tokens[10:41]]
    for _ in texts:
        lm.kv.add_row()
    lm.catch_up(texts)
    lm.kv.swap_remove(0)
    nodes = tokens[41:48]
    lm.forward(torch.tensor([[texts[1][-1], *nodes]]), torch.tensor([PARENTS]))
    lm.kv.keep(0, PATHS[-1])
    text = [*texts[1], *(nodes[column - 1] for column in PATHS[-1][1:]), *tokens[48:54]]
    parts = lm.kv.read(0, 0, lm.kv.lengths[0])  # as pages of prefixes have it
    lm.kv.truncate(0, 0)
    lm.kv.put(0, 0, parts)
    ours = lm.forward(torch.tensor([text[-6:]])).logits[0]
    return worst(ours, reference(torch.tensor([text]), use_cache=False).logits[0, -6:])


def changed(program: Program, code: Code, change: Callable[[Op], Op]) -> None:
    program.body[:] = [change(op) if op.code == code else op for op in program.body]


def another_score(program: Program) -> None:
    changed(program, Code.CHOICE, lambda op: replace(op, scale=-op.scale))


def choice_of_the_first_layer(program: Program) -> None:
    first = next(op for op in program.body if op.code == Code.CHOICE).output
    assert first is not None
    changed(program, Code.ATTENTION, lambda op: replace(op, inputs=(op.inputs[0], first)))


def one_less(program: Program) -> None:
    changed(program, Code.ATTENTION, lambda op: replace(op, chosen=op.chosen - 1))


def keys_that_stay(program: Program) -> None:
    num_layers = SIZES["num_hidden_layers"]
    program.body[:] = [op for op in program.body if op.code != Code.STORE or op.layer < num_layers]


@pytest.mark.parametrize(
    ("change", "is_found"),
    [
        (lambda program: None, False),
        (another_score, True),
        (choice_of_the_first_layer, True),
        (keys_that_stay, True),
    ],
    ids=["none", "another score", "another layer's", "keys that stay"],
)
@torch.inference_mode()
def test_a_wrong_position_is_found(
    change: Callable[[Program], None], is_found: bool, library_path: Path
) -> None:
    """The mutations of the native way, and the comparison that finds them."""
    apart = behind_a_tree(on_our_cache(model(), library_path, change), model())
    assert apart > 100 * TOLERANCE if is_found else apart < TOLERANCE


def test_attention_to_positions_that_nothing_chose_is_refused(library_path: Path) -> None:
    """A program is checked before it runs: these would be read from memory that nothing wrote."""
    with pytest.raises(NotLoweredError, match="attention to positions that nothing chose"):
        on_our_cache(model(), library_path, one_less)


@pytest.mark.parametrize("runtime", ["eager", "native"])
@torch.inference_mode()
def test_a_stale_key_is_found(
    runtime: str, library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = library_path if runtime == "native" else None
    plain = KVCache.keep
    assert behind_a_tree(on_our_cache(model(), path), model()) < TOLERANCE
    monkeypatch.setattr(KVCache, "keep", lambda kv, row, kept: keep_and_leave(kv, row, kept, plain))
    assert behind_a_tree(on_our_cache(model(), path), model()) > 100 * TOLERANCE


@torch.inference_mode()
def test_a_wrong_position_is_found_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_best(number: int, scores: Scores) -> Tensor:
        found = attention.choose(number, replace(scores, count=scores.count + 1))
        return torch.cat([found[..., :-2], found[..., -1:]], dim=-1)

    lm = on_our_cache(model(), None)
    monkeypatch.setitem(CHOOSE, attention.NAME, next_best)
    assert behind_a_tree(lm, model()) > 100 * TOLERANCE


# ---------------------------------------------------------------- what is kept, and refused


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_is_one_more_layer(family: str) -> None:
    """Layers that share another's choice keep no key of their own."""
    lm = on_our_cache(model(family), None)
    num_layers = lm.shape.num_layers
    assert num_layers == FAMILIES[family].get("num_hidden_layers", SIZES["num_hidden_layers"])
    assert (
        lm.shape.layers[num_layers:]
        == (LayerShape(1, FAMILIES[family]["index_head_dim"], 0, is_indexer=True),) * 2
    )


def test_a_gpu_takes_transformers_cache() -> None:
    module = model()
    hand_over(module)
    assert indexer_layers(module)
    with pytest.raises(
        OwnCacheNeededError, match="its layers keep more than keys and values of each token"
    ):
        refuse_other_caches(module, torch.device("cuda"))
    with pytest.raises(NotLoweredError, match="an indexer's choice of positions"):
        device_run._refuse_program(lower(module))


def test_an_indexer_that_scores_otherwise_takes_transformers_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches scores that are taken for rectified ones."""
    monkeypatch.setattr(
        modeling_deepseek_v32, "F", SimpleNamespace(relu=F.softplus, linear=F.linear)
    )
    lm = build_lm(model(), "tiny", torch.float32, CPU)
    assert isinstance(lm, StateLM)
    assert "an indexer that scores in another way" in (lm.why_own_cache or "")
