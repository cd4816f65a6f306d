"""Layers with windows hold the last positions alone: every number is that of a cache which keeps
whole texts, to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.cache import cache_folder
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.base import Drafter
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.none import NoDrafter
from outrider.kv.cache import LayerShape
from outrider.kv.view import KVView
from outrider.models.draft_loop import DraftLoop, DraftLoopProgram
from outrider.models.graphs import GraphedPass, Graphs
from outrider.models.lm import LM
from outrider.models.loading.load import build_lm, finish
from outrider.runtime.drafting import ChainLoop
from outrider.runtime.gpu.run import use_device_run
from outrider.runtime.limits import find_native_limits
from outrider.runtime.ops import Code, Op
from outrider.runtime.run import use_native_run
from outrider.runtime.windows import kept_layers
from outrider.sampling.params import SamplingParams
from outrider.verifiers import VERIFIERS
from tests.contract.test_our_cache import TreesThatErr
from tests.helpers import OracleThatErrs, greedy_draws, make_row, run_to_end
from tests.unit.runtime.families import SIZES, make
from tests.unit.runtime.gpu.fake_triton import fake_triton

CPU = torch.device("cpu")
VOCAB = SIZES["vocab_size"]
WINDOW = 16
FP32 = torch.float32
BF16 = torch.bfloat16
GAMMA = 4


def test_a_layer_is_kept_as_far_as_its_widest_reader_looks() -> None:
    """Catches a layer that is cut for the last or the narrowest of several operations. Where one
    reads everything, all stays."""
    ops = [
        Op(Code.ATTENTION, (), None, layer=layer, window=window)
        for layer, window in (
            (0, 16),
            (0, 64),
            (0, 32),
            (1, 16),
            (1, 0),
            (2, 16),
            (4, 128),
            (5, 127),
        )
    ]
    program = SimpleNamespace(body=[*ops, Op(Code.STORE, (), None, layer=2)])
    shape = LayerShape(1, 2, 2, window=7)
    layers = kept_layers([shape] * 6, program, context_length=128)  # type: ignore[arg-type]
    assert [layer.window for layer in layers] == [64, None, 16, None, None, 127]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@torch.inference_mode(False)
def native(family: str, dtype: torch.dtype = FP32) -> LM:
    return native_lm(make(family, dtype))


@torch.inference_mode(False)
def native_lm(module: Any) -> LM:
    lm = build_lm(module, module.config.model_type, module.dtype, CPU)
    use_native_run(lm, module, cache_folder())
    lm.limits = find_native_limits(lm)
    return lm


@torch.inference_mode(False)
def eager(family: str, dtype: torch.dtype = FP32) -> LM:
    module = make(family, dtype)
    lm = build_lm(module, family, dtype, CPU)
    finish(lm, module)
    return lm


@torch.inference_mode(False)
def whole(lm: LM) -> LM:
    """The same model on a cache that keeps all of a text in every layer."""
    twin = LM(
        lm.run,
        replace(lm.shape, layers=tuple(replace(shape, window=None) for shape in lm.shape.layers)),
        lm.dtype,
        CPU,
    )
    twin.limits = lm.limits
    twin.kernels = lm.kernels
    return twin


def text_of(length: int, seed: int) -> list[int]:
    return torch.randint(
        0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


class History:
    """Passes over a batch, the same for every model: prompts in chunks, chains and trees with
    rejections at every depth, rows that leave and come back."""

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        self._rng = random.Random(5)
        self.found = list[Tensor]()
        self._seed = 0
        self.lm.kv.clear()

    def run(self) -> list[Tensor]:
        for row, length in enumerate((1500, 300, 1010)):
            self.lm.kv.add_row()
            self._read(row, length)
        for step in range(20):
            self._step()
            if step == 8:
                self.lm.kv.swap_remove(1)
            if step == 12:
                self.lm.kv.unpack(self.lm.kv.add_row(), self.lm.kv.pack(0))
                self.lm.kv.swap_remove(0)
            self.lm.kv.check_integrity()
        return self.found

    def _read(self, row: int, length: int) -> None:
        while (done := self.lm.kv.lengths[row]) < length:
            width = min(self._rng.choice((256, 100, 37)), length - done)
            self.found.append(
                self.lm.forward(
                    self._tokens(1, width), columns=torch.tensor([width - 1]), first_row=row
                ).logits
            )
            self.lm.kv.advance(row, width)

    def _step(self) -> None:
        num_rows = self.lm.kv.num_rows
        width = self._rng.choice((1, 2, 5, 8, 30))
        parents = [
            [self._rng.randint(-1, node - 1) for node in range(width - 1)] for _ in range(num_rows)
        ]
        is_tree = width > 2 and self._rng.random() < 0.5
        self.found.append(
            self.lm.forward(
                self._tokens(num_rows, width), torch.tensor(parents) if is_tree else None
            ).logits
        )
        for row in range(num_rows):
            path = (
                _path(parents[row], self._rng)
                if is_tree
                else list(range(self._rng.randint(1, width)))
            )
            self.lm.kv.keep(row, path)

    def _tokens(self, num_rows: int, width: int) -> Tensor:
        self._seed += 1
        return torch.tensor([text_of(width, 100 * self._seed + row) for row in range(num_rows)])


def _path(parents: list[int], rng: random.Random) -> list[int]:
    """A way down a tree that ends anywhere, as offsets in its pass."""
    path = [0]
    node = -1
    while children := [child for child, parent in enumerate(parents) if parent == node]:
        if rng.random() < 0.2:
            break
        node = rng.choice(children)
        path.append(node + 1)
    return path


MODELS = {
    "every layer windowed": partial(native, "mistral"),
    "every layer windowed, bf16": partial(native, "mistral", BF16),
    "soft caps": partial(native, "gemma2"),
    "soft caps, bf16": partial(native, "gemma2", BF16),
    "sinks, bf16": partial(native, "gpt_oss", BF16),
    "layers that share keys": partial(native, "gemma3n_text"),
    "values of another size": partial(native, "mimo_v2_flash"),
    "torch": partial(eager, "mistral"),
    "torch, bf16": partial(eager, "gemma3_text", BF16),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_pass_has_the_bits_of_a_whole_cache(name: str) -> None:
    """Catches a key that is lost, shifted or read in another order, in rows of unequal length up to
    a hundred windows long."""
    lm = MODELS[name]()
    all_of_it = whole(lm)
    found = History(lm).run()
    assert all(map(torch.equal, found, History(all_of_it).run()))
    assert max(lm.kv.bases) > 0 < min(lm.kv.lengths)
    assert all_of_it.kv.bases == [0, 0], "the reference kept everything"
    assert lm.kv.allocated_bytes < all_of_it.kv.allocated_bytes


@pytest.mark.slow
def test_sums_that_torch_may_order_otherwise_keep_everything() -> None:
    """Attention with soft caps and sinks is written out in products that add up in another order
    elsewhere in a store."""
    for family in ("gemma2", "gpt_oss", "mimo_v2_flash"):
        assert all(shape.window is None for shape in eager(family).shape.layers)
        assert WINDOW in [shape.window for shape in native(family).shape.layers]


def test_a_window_as_wide_as_the_context_is_none() -> None:
    """Catches a cache that moves rows about for nothing."""
    with torch.inference_mode(False):
        module = make("mistral")
        lm = build_lm(module, "mistral", FP32, CPU)
        lm.shape = replace(lm.shape, context_length=WINDOW)
        use_native_run(lm, module, cache_folder())
    assert lm.kv.window is None


# ---------------------------------------------------------------- texts


def written(
    lm: LM, drafter: Drafter, gamma: int = GAMMA, verifier: str = "block"
) -> list[list[int]]:
    decoder = Decoder(lm, drafter, VERIFIERS.load(verifier)(), FixedLength(gamma))
    lm.kv.clear()
    for number, prompt in enumerate(PROMPTS):
        decoder.add(
            make_row(prompt, SamplingParams(max_tokens=LENGTH, ignore_eos=True), number=number)
        )
    return [row.output for row in run_to_end(decoder)]


def greedy(lm: LM, prompt: list[int], count: int) -> list[int]:
    """What plain decoding writes behind a prompt."""
    decoder = Decoder(lm, NoDrafter(), VERIFIERS.load("block")(), FixedLength(0))
    lm.kv.clear()
    decoder.add(make_row(prompt, SamplingParams(max_tokens=count, ignore_eos=True)))
    return run_to_end(decoder)[0].output


PROMPTS = [text_of(length, 60 + length) for length in (900, 30, 1400)]
LENGTH = 300


@pytest.mark.slow
@pytest.mark.parametrize(
    "load", [partial(native, "mistral"), partial(native, "gemma2", BF16), partial(eager, "mistral")]
)
def test_greedy_texts(load: Callable[[], LM]) -> None:
    """Whole texts, alone and drafted for by chains and trees that err at every depth, cross the end
    of a slot again and again."""
    lm = load()
    expected = written(whole(lm), NoDrafter(), 0)
    assert written(lm, NoDrafter(), 0) == expected
    assert written(lm, OracleThatErrs(expected)) == expected
    assert written(lm, TreesThatErr(expected), 2 * GAMMA, "traversal") == expected


class Recorded(ModelDrafter):
    """Remembers what it proposed."""

    def __init__(self, lm: LM, loop: Any = None) -> None:
        super().__init__(lm, loop)
        self.proposed: list[list[list[int]]] = []

    def propose(self, rows: Any, gamma: list[int]) -> Any:
        draft = super().propose(rows, gamma)
        self.proposed.append(draft.lists[0])
        return draft


def looped(lm: LM) -> ModelDrafter:
    return Recorded(lm, ChainLoop(lm, lm.run, VOCAB))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("make_drafter", [Recorded, looped])
def test_a_draft_model_forgets_what_its_windows_have_passed(
    make_drafter: Callable[[LM], Recorded],
) -> None:
    """Its rejected tokens are taken back from what it has committed: it proposes what it does on a
    whole cache."""
    target = native("gemma2")
    draft = native("mistral")
    drafters = [make_drafter(lm) for lm in (draft, whole(draft))]
    texts = [written(target, drafter) for drafter in drafters]
    assert texts[0] == texts[1]
    assert drafters[0].proposed == drafters[1].proposed
    assert 0 < drafters[0].lm.kv.allocated_bytes < drafters[1].lm.kv.allocated_bytes


def test_a_draft_on_the_targets_own_keys() -> None:
    """It writes behind what the target holds; the target's rows move for it, too."""
    target = native("gemma2")
    expected = written(target, NoDrafter(), 0)

    class Follower(ModelDrafter):
        reads_texts = False

        def commit(self, *seen: Any) -> None:
            self.lm.kv.follow()  # type: ignore[attr-defined]

        def _catch_up(self, rows: Any) -> list[list[int]]:
            self.lm.kv.follow()  # type: ignore[attr-defined]
            return super()._catch_up(rows)

    lm = LM(target.run, target.shape, target.dtype, CPU)
    lm.limits = target.limits
    lm.kernels = target.kernels
    lm.kv = KVView(target.kv)
    drafter = Follower(lm, ChainLoop(lm, lm.run, VOCAB))  # type: ignore[arg-type]
    assert written(target, drafter) == expected


# ---------------------------------------------------------------- what runs on a device


def filled(lm: LM, lengths: tuple[int, ...]) -> LM:
    """Rows of these lengths with random keys and values, the same for every cache."""
    shapes = [(shape.num_kv_heads, shape.key_size) for shape in lm.shape.layers]
    shapes += [(shape.num_kv_heads, shape.value_size) for shape in lm.shape.layers]
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(row)
        lm.kv.put(
            lm.kv.add_row(),
            0,
            [torch.randn(length, *shape, generator=generator).to(lm.dtype) for shape in shapes],
        )
    return lm


def test_the_recorded_drafting_loop() -> None:
    """Its arithmetic, as it is: a row's base stays while it drafts."""
    found = []
    with torch.inference_mode(False):
        module = make("mistral")
        lm = build_lm(module, "mistral", FP32, CPU)
    for one in (lm, whole(lm)):
        loop = DraftLoop(
            filled(one, (1500, 700)), {GAMMA: DraftLoopProgram(one, module, GAMMA, VOCAB)}
        )
        tokens = [loop([[5], [6, 7]], greedy_draws(GAMMA, VOCAB), GAMMA)[0] for _ in range(2)]
        found.append((tokens, one.forward(torch.tensor([[1, 2], [3, 4]])).logits))
    assert torch.equal(torch.stack(found[0][0]), torch.stack(found[1][0]))
    assert torch.equal(found[0][1], found[1][1])
    assert max(lm.kv.bases) > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_our_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, without one: chains by indices and trees by masks, in passes that could be
    recorded."""
    monkeypatch.setattr("outrider.runtime.gpu.run.find_spec", lambda name: name)
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    parents = torch.tensor([[-1, 0], [-1, -1]])
    with fake_triton():
        with torch.inference_mode(False):
            module = make(family)
            lm = build_lm(module, family, FP32, CPU)
            use_device_run(lm, module)
        lm.run = run = GraphedPass(lm.run)
        run.graphs = Graphs(max_graphs=0)  # never recorded: there is nothing to record on
        all_of_it = filled(whole(lm), (1500, 700))
        filled(lm, (1500, 700))
        assert max(lm.kv.bases) > 0
        for tree in (None, parents):
            assert torch.equal(
                lm.forward(tokens, tree).logits, all_of_it.forward(tokens, tree).logits
            )
            for one in (lm, all_of_it):
                one.kv.keep(0, [0, 1])
                one.kv.keep(1, [0, 2] if tree is not None else [0])
