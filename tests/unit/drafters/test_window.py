"""Drafts within a window: those of the same weights with a sliding window, as transformers makes
them, in texts far longer than the draft knows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from outrider.cache import cache_folder
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.base import DraftSetup
from outrider.drafters.model.draft_tree import DraftModelSettings, TreeModelDrafter
from outrider.drafters.window import trained_length, window_notes, window_of
from outrider.errors import CapabilityError, ConfigError
from outrider.models.loaded import LoadedModel
from outrider.models.loading.load import build_lm, finish
from outrider.models.loading.read_card import card_of
from outrider.runtime.limits import find_native_limits
from outrider.runtime.run import use_native_run
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from outrider.verifiers.traversal import TraversalVerifier
from tests.helpers import make_row, tiny_llama

VOCAB = 60
KNOWN = 64  # positions that the draft knows
WINDOW = 16
NODES = 4
LONG = 1400  # tokens: more than two blocks of a cache
CPU = torch.device("cpu")
MASK = 7
RUNTIMES = ("eager", "native")
# tree, mask token
KINDS: list[tuple[str, int | None]] = [
    ("chain", None), ("best-first", None), ("2x1x1", None), ("parallel:2", None),
    ("chain", MASK), ("2x1x1", MASK),
]  # fmt: skip


def text_of(length: int, seed: int = 0) -> list[int]:
    return [3 + (seed * 31 + index * 7 + index * index // 3) % 55 for index in range(length)]


@torch.inference_mode(False)
def loaded(module: Any, runtime: str = "eager", **values: Any) -> LoadedModel:
    module = copy.deepcopy(module).requires_grad_(False)
    lm = build_lm(module, module.config.model_type, torch.float32, CPU)
    if runtime == "native":
        use_native_run(lm, module, cache_folder())
        lm.limits = find_native_limits(lm)
    else:
        finish(lm, module)
    card = card_of(module.config)
    card.values.update(values)
    return LoadedModel(module.config.model_type, lm, card, None, frozenset())


def draft_module(**changes: Any) -> Any:
    return tiny_llama(VOCAB, sharpness=3.0, seed=5, **{"max_position_embeddings": KNOWN, **changes})


def target(runtime: str = "eager") -> LoadedModel:
    module = tiny_llama(VOCAB, sharpness=2.0, num_hidden_layers=1, max_position_embeddings=4096)
    return loaded(module, runtime)


def drafter_of(target: LoadedModel, draft: LoadedModel, **settings: Any) -> Any:
    return TreeModelDrafter.build(DraftSetup(target, draft, NODES, DraftModelSettings(**settings)))


def decoder_of(target: LoadedModel, drafter: Any, *texts: list[int]) -> Decoder:
    target.lm.kv.lengths.clear()
    decoder = Decoder(target.lm, drafter, TraversalVerifier.build(None), FixedLength(NODES))
    for text in texts:
        decoder.add(make_row(text, SamplingParams(max_tokens=40, ignore_eos=True)))
    return decoder


def drafts_of(decoder: Decoder, num_steps: int) -> list[tuple[list[list[int]], Draft]]:
    """The texts of a step, and the draft that was made for them, of the next steps."""
    seen: list[tuple[list[list[int]], Draft]] = []
    propose = decoder.drafter.propose

    def watching(rows: Any, gamma: list[int]) -> Draft:
        draft = propose(rows, gamma)
        seen.append(([list(row.tokens) for row in rows], draft))
        return draft

    decoder.drafter.propose = watching  # type: ignore[method-assign]
    for _ in range(num_steps):
        decoder.step()
    return seen


class Reference:
    """The draft's weights in transformers' own model with a sliding window."""

    @torch.inference_mode(False)
    def __init__(self, module: Any, window: int) -> None:
        config = module.config.to_dict()
        for name in ("model_type", "architectures", "sliding_window"):
            config.pop(name, None)
        config = MistralConfig(
            **{**config, "sliding_window": window, "max_position_embeddings": 4096}
        )
        config._attn_implementation = "eager"
        self._module = MistralForCausalLM(config).eval()
        self._module.load_state_dict(module.state_dict())

    def logits(self, tokens: list[int]) -> Tensor:
        """Behind the last token."""
        return self._module(torch.tensor([tokens]), use_cache=False).logits[0, -1]

    def check(self, tokens: list[int], draft: Draft, index: int, mask_token: int | None) -> int:
        """Every node must be among the likeliest behind its parent, a chain's the likeliest; how
        many there were."""
        found, lengths = draft.lists[:2]
        for node in range(lengths[index]):
            path: list[int] = []
            at = draft.parent_lists[index][node]
            while at >= 0:
                path.insert(0, found[index][at] if mask_token is None else mask_token)
                at = draft.parent_lists[index][at]
            logits = self.logits([*tokens, *path])
            rank = int((logits > logits[found[index][node]] + 1e-4).sum())
            assert rank <= (0 if draft.parents is None else 3), (node, rank)
        return lengths[index]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(("tree", "mask_token"), KINDS)
@torch.inference_mode()
def test_drafts_are_those_of_a_sliding_window(
    runtime: str, tree: str, mask_token: int | None
) -> None:
    """Catches a window that is off by one, measured along storage, or missing in one pass of
    several; a draft that stops where the model's own context ends; a row that sees another's."""
    module = draft_module()
    draft = loaded(module, runtime, **({} if mask_token is None else {"pard_token": mask_token}))
    big = target(runtime)
    drafter = drafter_of(big, draft, tree=tree, window=WINDOW, min_gain=0.0)
    decoder = decoder_of(big, drafter, text_of(LONG), text_of(10, 1), text_of(700, 2))
    reference = Reference(module, WINDOW)
    checked = 0
    for tokens, draft_made in drafts_of(decoder, 3):
        for index, text in enumerate(tokens):
            checked += reference.check(text, draft_made, index, mask_token)
    assert checked == 3 * 3 * NODES


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("tree", ["chain", "best-first"])
@torch.inference_mode()
def test_a_window_as_long_as_the_text_changes_nothing(runtime: str, tree: str) -> None:
    """Catches a window that costs drafts where it hides nothing; and another drafter on the same
    model that is left with the window."""
    big = target(runtime)
    draft = loaded(draft_module(max_position_embeddings=4096), runtime)
    found = []
    for window in (0, 600, 0, 4096, "auto"):
        drafter = drafter_of(big, draft, tree=tree, window=window, min_gain=0.0)
        decoder = decoder_of(big, drafter, text_of(500), text_of(20, 1))
        found.append([made.lists[:2] for _, made in drafts_of(decoder, 6)])
        while decoder.rows:
            decoder.remove(0)
    assert all(drafts == found[0] for drafts in found)


@pytest.mark.parametrize("runtime", RUNTIMES)
@torch.inference_mode()
def test_a_window_forgets(runtime: str) -> None:
    """Catches attention that reaches further back: layers together see as many windows as there are
    of them. What comes before changes no draft and no law; with the whole text it does."""
    big = target(runtime)
    draft = loaded(draft_module(max_position_embeddings=4096), runtime)
    same = text_of(2 * WINDOW, 9)
    logits = []
    for window in (WINDOW, 0):
        drafter = drafter_of(big, draft, window=window)
        for before in (text_of(900), text_of(900, 3)):
            lm = drafter.lm.twin()
            lm.kv.add_row()
            lm.catch_up([[*before, *same, 5]])
            logits.append(lm.forward(torch.tensor([[5]])).logits)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[2], logits[3])


@torch.inference_mode()
def test_what_no_window_reaches_is_not_kept() -> None:
    """Catches a cache, and with it the cost of a draft, that grows with the text."""
    draft = loaded(draft_module(), "native")
    big = target("native")
    held = {}
    for window in (WINDOW, 4096):
        lm = drafter_of(big, draft, window=window).lm
        for length in (600, 3000):
            twin = lm.twin()
            twin.kv.add_row()
            twin.catch_up([text_of(length)])
            held[window, length] = twin.kv.allocated_bytes
    assert held[WINDOW, 600] == held[WINDOW, 3000]
    assert held[4096, 3000] > held[4096, 600]


def test_a_draft_without_a_window_ends_with_its_context() -> None:
    """And says so; with a window it goes on, and does not."""
    big = target()
    draft = loaded(draft_module())
    assert drafter_of(big, draft).longest_text == KNOWN
    assert drafter_of(big, draft, window=WINDOW).longest_text == 4096


def test_auto_is_the_length_that_the_draft_was_trained_for() -> None:
    big = target()
    drafter = drafter_of(big, loaded(draft_module()), window="auto")
    assert drafter.lm.shape.sliding_window == KNOWN
    assert drafter.notes == ["window=auto: 'llama' sees the last 64 tokens while it drafts"]
    stretched = draft_module(
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    )  # fmt: skip
    assert drafter_of(big, loaded(stretched), window="auto").lm.shape.sliding_window == 16
    long = loaded(draft_module(max_position_embeddings=8192))
    drafter = drafter_of(big, long, window="auto")
    assert drafter.lm is long.lm, "it sees all of every text"
    assert drafter.notes == ["window=auto: 'llama' sees all of a text while it drafts"]


@pytest.mark.parametrize(
    ("known", "values", "expected"),
    [
        (None, {}, None),
        (4096, {"rope_parameters": {"rope_type": "default"}}, 4096),
        (4096, {"original_max_position_embeddings": 1024}, 1024),
        (4096, {"rope_scaling": {"original_max_position_embeddings": 512}}, 512),
        (
            4096,
            {"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 512}},
            4096,
        ),
        (4096, {"rope_parameters": {"full": {"original_max_position_embeddings": 256}}}, 256),
        (4096, {"original_max_position_embeddings": "many"}, 4096),
        (4096, {"original_max_position_embeddings": -1}, 4096),
        (None, {"rope_type": "yarn", "original_max_position_embeddings": 128}, 128),
    ],
)
def test_the_trained_length_of_a_config(
    known: int | None, values: dict[str, Any], expected: int | None
) -> None:
    assert trained_length(known, values) == expected


def test_which_window_is_meant() -> None:
    assert window_of(0, 100, 1000, 4, "it") is None
    assert window_of("auto", None, 1000, 4, "it") is None
    assert window_of("auto", 100, 1000, 4, "it") == 100
    assert window_of("auto", 1000, 1000, 4, "it") is None
    assert window_of(5000, 100, 1000, 4, "it") == 1000
    assert window_notes(100, 100, "it") == []
    with pytest.raises(ConfigError, match="it: window=4 is smaller than a draft of 4 tokens: at"):
        window_of(4, 100, 1000, 4, "it")
    with pytest.raises(ConfigError, match="it: window=auto, here 3, is smaller than a draft of 4"):
        window_of("auto", 3, 1000, 4, "it")


@pytest.mark.parametrize("window", [-1, "all", 2.5])
def test_what_is_no_window(window: Any) -> None:
    with pytest.raises(ConfigError, match="window must be"):
        DraftModelSettings(window=window)


def test_a_draft_that_cannot_have_a_window_is_refused() -> None:
    """By its name, and why."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2))
    gemma = Gemma3ForCausalLM(
        Gemma3TextConfig(
            **sizes, **heads, intermediate_size=64, sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        )
    )  # fmt: skip
    state = Mamba2ForCausalLM(
        Mamba2Config(**sizes, num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=16)
    )
    big = target()
    for module, why in (
        (bloom, "'bloom' takes no window: its positions are not rotary"),
        (gemma, "'gemma3_text' takes no window: some of its layers have a window of 8"),
        (state, "'mamba2' takes no window: "),
    ):
        draft = loaded(module.eval())
        with pytest.raises(CapabilityError, match=why):
            drafter_of(big, draft, window=WINDOW)
        drafter_of(big, draft)
    assert drafter_of(big, loaded(gemma), window=6).lm.shape.sliding_window == 6
