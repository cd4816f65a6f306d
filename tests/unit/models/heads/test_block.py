"""Block heads: their arithmetic against one written out from the papers, and every layout that the
world publishes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from outrider.errors import CapabilityError, CheckpointError, ConfigError
from outrider.kv import KVCache, LayerShape
from outrider.models.heads.block import BlockHead
from outrider.models.heads.block_config import BlockConfig
from outrider.models.heads.block_files import export_block, load_block, save_block
from outrider.models.heads.block_pass import ModulePasses, Pending, Unread
from outrider.models.heads.kinds import head_kind
from outrider.models.source import resolve
from outrider.models.tokens.vocabulary import OUTSIDE

# D is not H / HEADS
H = 16
V = 13
HEADS = 4
KV = 2
D = 6
LAYERS = 2
TARGET_LAYERS = 8


def config_of(**changes: Any) -> BlockConfig:
    values: dict[str, Any] = {
        "hidden_size": H,
        "intermediate_size": 20,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "num_kv_heads": KV,
        "head_dim": D,
        "vocab_size": V,
        "block_size": 4,
        "target_hidden_size": H,
        "target_layers": (2, 6),
        "num_target_layers": TARGET_LAYERS,
        "mask_token_id": 5,
        "markov_rank": 3,
        "confidence": True,
        "trained_for": "a/target",
    }
    return BlockConfig(**{**values, **changes})


def random_head(token_ids: Tensor | None = None, **changes: Any) -> BlockHead:
    torch.manual_seed(0)
    head = BlockHead(config_of(**changes), token_ids)
    for weight in head.parameters():
        weight.data.copy_(torch.randn(weight.shape) * 0.4)
    head.bind(torch.nn.Embedding(V, H), torch.nn.Linear(H, V, bias=False))
    return head.requires_grad_(False).eval()


def norm(states: Tensor, weight: Tensor) -> Tensor:
    return states * torch.rsqrt((states**2).mean(-1, keepdim=True) + 1e-6) * weight


def rotated(states: Tensor, position: int, theta: float = 10000.0) -> Tensor:
    """RoPE of one vector (D,), half against half, as Llama and Qwen have it."""
    half = D // 2
    angles = torch.tensor([position * theta ** (-2 * i / D) for i in range(half)])
    first = states[:half]
    second = states[half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
    )


def convolved(states: Tensor, base: Tensor, deltas: Tensor) -> Tensor:
    """DFlash2's convolution of a block (S, H), number by number: base (taps, H), deltas (S, taps,
    groups)."""
    found = torch.zeros_like(states)
    group = H // deltas.shape[2]
    for slot in range(len(states)):
        for channel in range(H):
            for tap in range(min(len(base), slot + 1)):
                kernel = base[tap, channel] + deltas[slot, tap, channel // group]
                found[slot, channel] += kernel * states[slot - tap, channel]
    return found


def around(
    weights: dict[str, Tensor], name: str, states: Tensor, part: Callable[[Tensor], Tensor]
) -> Tensor:
    """A layer's part between its convolutions, where it has any."""
    if f"{name}.base_kernel" not in weights:
        return part(states)
    base = weights[f"{name}.base_kernel"]
    kernels = (states @ weights[f"{name}.kernel_projection.weight"].T).view(
        len(states), 2, base.shape[1], -1
    )
    return convolved(part(convolved(states, base[0], kernels[:, 0])), base[1], kernels[:, 1])


def reference(head: BlockHead, hidden: list[Tensor], tokens: list[int]) -> Tensor:
    """States of a block behind T context positions, vector by vector."""
    weights = head.state_dict()
    # (T, H)
    context = norm(
        torch.cat(hidden, dim=-1) @ weights["fc.weight"].T, weights["hidden_norm.weight"]
    )
    states = head.tables()[0].weight[tokens]
    start = len(context)
    for layer in range(LAYERS):
        get = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in weights.items()}

        def attended(normed: Tensor, layer: int = layer, get: dict[str, Tensor] = get) -> Tensor:
            sources = [*context, *normed]
            mixed = []
            for slot in range(len(tokens)):
                heads = []
                for index in range(HEADS):
                    rows = slice(index * D, (index + 1) * D)
                    group = slice((index // (HEADS // KV)) * D, (index // (HEADS // KV) + 1) * D)
                    query = norm(
                        get["self_attn.q_proj.weight"][rows] @ normed[slot],
                        get["self_attn.q_norm.weight"],
                    )
                    query = rotated(query, start + slot)
                    window, causal = head.config.sight(layer)
                    end = start + slot + 1
                    seen = range(
                        max(0, end - window) if window else 0, end if causal else len(sources)
                    )
                    raw = [get["self_attn.k_proj.weight"][group] @ sources[i] for i in seen]
                    keys = [norm(key, get["self_attn.k_norm.weight"]) for key in raw]
                    scores = torch.stack(
                        [query @ rotated(key, i) for i, key in zip(seen, keys, strict=True)]
                    ) / math.sqrt(D)
                    values = torch.stack(
                        [get["self_attn.v_proj.weight"][group] @ sources[i] for i in seen]
                    )
                    heads.append(scores.softmax(-1) @ values)
                mixed.append(get["self_attn.o_proj.weight"] @ torch.cat(heads))
            return torch.stack(mixed)

        def widened(normed: Tensor, get: dict[str, Tensor] = get) -> Tensor:
            inner = F.silu(normed @ get["mlp.gate_proj.weight"].T) * (
                normed @ get["mlp.up_proj.weight"].T
            )
            return inner @ get["mlp.down_proj.weight"].T

        states = states + around(
            get, "attention_conv", norm(states, get["input_layernorm.weight"]), attended
        )
        states = states + around(
            get, "mlp_conv", norm(states, get["post_attention_layernorm.weight"]), widened
        )
    return norm(states, weights["norm.weight"])


def passed(head: BlockHead, hidden: list[Tensor]) -> Tensor:
    """States of a block behind a context that is read in two parts, the second beside the block."""
    kv = KVCache([LayerShape(KV, D, D)] * LAYERS, torch.float32, torch.device("cpu"))
    count = len(hidden[0])
    kv.add_row()
    kv.reserve(1, count + head.config.block_size)
    passes = ModulePasses(head)
    passes.read(kv, 0, Unread([states[None, :-2] for states in hidden], [count - 2], [count - 2]))
    kv.advance(0, count - 2)
    return passes.guess(
        kv, Pending([7], [count]), Unread([states[None, -2:] for states in hidden], [2], [count])
    ).states[0]


SIGHTS: list[dict[str, Any]] = [
    {}, {"causal": True}, {"window": 5, "window_layers": (1,)}, {"window": 4, "window_layers": (0,), "causal_windows": True},
    {"window": 6, "window_layers": (0, 1), "causal": True},
]  # fmt: skip


PLAIN: dict[str, Any] = {
    "markov_rank": 0,
    "confidence": False,
    "confidence_with_markov": False,
    "sample_from_anchor": False,
}
DFLASH2: dict[str, Any] = {
    "conv_taps": 3,
    "conv_group_size": 4,
    "selector_rank": 5,
    "selector_top_k": 4,
    **PLAIN,
}


@pytest.mark.parametrize("sight", [*SIGHTS, {**DFLASH2, "sample_from_anchor": True}], ids=str)
def test_a_pass_by_hand(sight: dict[str, Any]) -> None:
    """Catches queries from the context, keys that miss a norm or a rotation, a block that does not
    see itself, a window off by one or in another layer, a convolution beyond the block or with
    another token's kernel."""
    head = random_head(**sight)
    hidden = [torch.randn(5, H), torch.randn(5, H)]
    torch.testing.assert_close(
        passed(head, hidden), reference(head, hidden, [7, 5, 5, 5]), rtol=1e-4, atol=1e-5
    )


def muse(**changes: Any) -> MuseGlimmerAssistantModel:
    """transformers' own, random: what Meta publishes for Muse Glimmer."""
    config = MuseGlimmerAssistantConfig(
        hidden_size=H,
        intermediate_size=20,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=D,
        sliding_window=4,
        block_size=4,
        mask_token_id=5,
        target_layer_ids=[1, 5],
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        **changes,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = MuseGlimmerAssistantModel(config).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.data.copy_(torch.randn(weight.shape) * 0.4)
    return model


@pytest.mark.parametrize("kinds", [None, ["full_attention", "sliding_attention"]], ids=str)
def test_a_muse_assistant_is_transformers_own(tmp_path: Path, kinds: list[str] | None) -> None:
    """Catches its names not read, blocks made causal, a window that ends one position early."""
    model = muse(layer_types=kinds)
    hidden = [torch.randn(9, H), torch.randn(9, H)]
    model.save_pretrained(tmp_path)
    assert head_kind(resolve(str(tmp_path))) == "block"
    head = load_block(tmp_path, H, V, TARGET_LAYERS)
    head.bind(torch.nn.Embedding(V, H), torch.nn.Linear(H, V, bias=False))
    embedded = head.embed(head.block_tokens(torch.tensor([7])))
    cache = DFlashCache(config=model.config)
    cache.set_previous_accepted_tokens(9)
    expected = model(
        noise_embeds=embedded,
        context_hidden_states=torch.cat(hidden, -1)[None],
        past_key_values=cache,
    )
    torch.testing.assert_close(
        passed(head, hidden), expected.last_hidden_state[0, 1:], rtol=1e-4, atol=1e-5
    )


def test_a_selector_by_hand() -> None:
    """Catches scores by another token than the one before, or of tokens that are no candidates."""
    head = random_head(**DFLASH2)
    states = torch.randn(2, H)
    before = torch.tensor([3, 9])
    logits = torch.randn(2, V) * 3
    weights = head.candidate_selector.state_dict()
    found = head.corrected(logits, states, before)
    for row in range(2):
        asked = weights["predecessor_codebook"][before[row]] * (
            weights["hidden_projection.weight"] @ states[row]
        )
        candidates = sorted(range(V), key=lambda token, row=row: -float(logits[row, token]))[:4]
        for token in range(V):
            score = logits[row, token] + asked @ weights["successor_codebook"][token]
            assert float(found[row, token]) == pytest.approx(
                float(score) if token in candidates else OUTSIDE, abs=1e-4
            )


def test_markov_and_confidence_by_hand() -> None:
    """Catches a correction or a confidence that reads another token than the one before."""
    head = random_head()
    states = torch.randn(2, H)
    before = torch.tensor([3, 9])
    markov = head.markov_head
    wanted = head.logits(states) + markov.markov_w1.weight[before] @ markov.markov_w2.weight.T
    torch.testing.assert_close(head.corrected(head.logits(states), states, before), wanted)
    proj = head.confidence_head.proj
    features = torch.cat([states, markov.markov_w1.weight[before]], dim=-1)
    logit = features @ proj.weight[0] + proj.bias
    torch.testing.assert_close(head.confidence(0, states, before), torch.sigmoid(logit))
    calibrated = random_head(temperatures=(1.0, 2.0))
    divisors = torch.tensor([1.0, 2.0, 2.0])
    torch.testing.assert_close(
        calibrated.confidence(0, states, before), torch.sigmoid(logit / divisors[:2])
    )
    torch.testing.assert_close(
        calibrated.confidence(1, states, before), torch.sigmoid(logit / divisors[1:])
    )


SHAPES: list[dict[str, Any]] = [
    {}, {"markov_gated": True}, {"markov_recurrent": True}, {"markov_rank": 0, "confidence_with_markov": False},
    {"sample_from_anchor": False, "causal": True}, *SIGHTS[2:], DFLASH2,
    {"markov_rank": 0, "confidence": False, "confidence_with_markov": False, "sample_from_anchor": False},
    {"own_embedding": True, "own_output": True}, {"qk_norm": False, "attention_bias": True}, {"temperatures": (0.5, 1.5)},
    {"embedding_scale": 2.0, "logit_scale": 0.5, "softcap": 30.0, "norm_eps": 1e-5, "max_positions": 99},
    {"rope": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}, {"target_layers": (0, -1)},
]  # fmt: skip


@pytest.mark.parametrize("changes", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["saved", "raw", "speculators"])
def test_what_is_written_comes_back(tmp_path: Path, changes: dict[str, Any], layout: str) -> None:
    """Every flag survives, in every layout: none is lost, none gets a default instead."""
    head = random_head(**changes)
    if layout == "speculators" and -1 in head.config.target_layers:
        with pytest.raises(ConfigError, match="export this head as 'raw'"):
            export_block(head, tmp_path, layout)
        return
    if layout == "saved":
        save_block(head, tmp_path)
    else:
        export_block(head, tmp_path, layout)
    again = load_block(tmp_path, H, V, TARGET_LAYERS)
    assert again.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_a_reduced_vocabulary(tmp_path: Path) -> None:
    """Catches d2t read as ids: it holds offsets. Logits stand at the target's ids."""
    ids = torch.tensor([1, 4, 12])
    head = random_head(ids, draft_vocab_size=3, own_output=True)
    save_block(head, tmp_path)
    assert load_file(str(tmp_path / "model.safetensors"))["d2t"].tolist() == [1, 3, 10]
    again = load_block(tmp_path, H, V, TARGET_LAYERS)
    states = torch.randn(2, H)
    full = again.in_full(again.corrected(again.logits(states), states, torch.tensor([3, 9])))
    assert full.shape == (2, V)
    torch.testing.assert_close(
        full[:, ids], head.corrected(head.logits(states), states, torch.tensor([3, 9]))
    )
    assert float(full.softmax(-1)[:, ids].sum()) == pytest.approx(2)


def test_exports_with_tables_stand_alone(tmp_path: Path) -> None:
    head = random_head()
    export_block(head, tmp_path, "raw", tables=True)
    again = load_block(tmp_path, H, V, TARGET_LAYERS)
    states = torch.randn(1, H)
    torch.testing.assert_close(again.logits(states), head.logits(states))
    assert torch.equal(again.embed(torch.tensor([4])), head.embed(torch.tensor([4])))
    with pytest.raises(ConfigError, match="Did you mean 'raw'"):
        export_block(head, tmp_path, "rav")


def published(folder: Path, changes: dict[str, Any] | None = None, **tensors: Tensor) -> Path:
    """A DFlash folder as z-lab writes it."""
    folder.mkdir()
    found = {
        f"model.{name}": tensor.clone()
        for name, tensor in random_head(**PLAIN).state_dict().items()
    }
    save_file({**found, **tensors}, str(folder / "model.safetensors"))
    config = {
        "architectures": ["DFlashDraftModel"],
        "block_size": 4,
        "hidden_size": H,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 5,
        "head_dim": D,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "num_target_layers": TARGET_LAYERS,
        "max_position_embeddings": 40960,
        "attention_bias": False,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * LAYERS,
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 5]},
    }
    (folder / "config.json").write_text(json.dumps({**config, **(changes or {})}))
    return folder


def test_a_published_dflash_folder(tmp_path: Path) -> None:
    """Catches layer ids read as inputs (they count outputs), a block whose anchor guesses, a layer
    count from the config."""
    head = load_block(published(tmp_path / "a"), H, V, TARGET_LAYERS)
    assert head.config.target_layers == (2, 6)
    assert not head.config.sample_from_anchor
    assert head.config.num_guesses == 3
    assert head.config.num_layers == LAYERS
    assert head.config.rope == {"rope_type": "default", "rope_theta": 1e6}
    last = load_block(
        published(
            tmp_path / "b", {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [-1, 7]}}
        ),
        H,
        V,
        8,
    )
    # the embeddings, and what stands behind the final norm
    assert last.config.target_layers == (0, -1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"projector_type": "domino"}, "domino"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(CapabilityError, match=words):
        load_block(published(tmp_path / "a", changes), H, V, TARGET_LAYERS)


SLIDING = "sliding_attention"


@pytest.mark.parametrize(
    ("changes", "sights"),
    [
        (
            {"layer_types": ["full_attention", SLIDING], "sliding_window": 9},
            [(0, False), (9, True)],
        ),
        (
            {"layer_types": [SLIDING, SLIDING, SLIDING], "sliding_window": 9, "is_causal": False},
            [(9, False)] * 2,
        ),
        (
            {"layer_types": [SLIDING] * 2, "sliding_window": 9, "sliding_window_non_causal": True},
            [(9, False)] * 2,
        ),
        ({"layer_types": None, "use_swa": True, "swa_window_size": 7}, [(7, False)] * 2),
        ({"causal_head": True}, [(0, True)] * 2),
        (
            {"layer_types": ["full_attention", SLIDING], "sliding_window": 9, "causal": True},
            [(0, True), (9, True)],
        ),
    ],
    ids=str,
)
def test_who_sees_whom_is_read_of_configs(
    tmp_path: Path, changes: dict[str, Any], sights: list[tuple[int, bool]]
) -> None:
    """z-lab's mixed layers, speculators', MiMo's and JetSpec's words."""
    config = load_block(published(tmp_path / "a", changes), H, V, TARGET_LAYERS).config
    assert [tuple(config.sight(layer)) for layer in range(LAYERS)] == sights


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": [SLIDING] * 2}, "no 'sliding_window'"),
        ({"layer_types": [SLIDING]}, "types of 1 layers"),
        (
            {"layer_types": [SLIDING] * 2, "sliding_window": 3},
            "3 is smaller than a draft, block_size 4",
        ),
    ],
)
def test_windows_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_block(published(tmp_path / "a", changes), H, V, TARGET_LAYERS)


def test_parts_of_other_heads_are_refused(tmp_path: Path) -> None:
    rnn = published(tmp_path / "a", None, **{"markov_head.joint_proj.weight": torch.zeros(2, 2)})
    # the rest of a Markov head is missing
    with pytest.raises(CheckpointError, match=r"markov_head\.joint_proj"):
        load_block(rnn, H, V, TARGET_LAYERS)
    other = published(tmp_path / "b", None, **{"prefix_gru.weight_ih_l0": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=r"no part of a block head.*prefix_gru"):
        load_block(other, H, V, TARGET_LAYERS)


def test_dflash2_folders(tmp_path: Path) -> None:
    """Codebooks as modules or not; what does not fit is refused by name."""
    dflash = {"mask_token_id": 5, "target_layer_ids": [1, 5], "projector_type": "dflash2"}
    settings = {"selector_top_k": 4, "dflash_config": dflash}
    weights = random_head(**DFLASH2).state_dict()
    parts = {
        name: tensor for name, tensor in weights.items() if "conv." in name or "selector." in name
    }
    head = load_block(published(tmp_path / "a", settings, **parts), H, V, TARGET_LAYERS)
    assert (head.config.conv_taps, head.config.conv_group_size, head.config.selector_rank) == (
        3,
        4,
        5,
    )
    modules = {
        f"{name}.weight" if "codebook" in name else name: tensor for name, tensor in parts.items()
    }
    again = load_block(published(tmp_path / "b", settings, **modules), H, V, TARGET_LAYERS)
    assert torch.equal(
        again.candidate_selector.successor_codebook, head.candidate_selector.successor_codebook
    )
    alone = {name: tensor for name, tensor in parts.items() if "selector." not in name}
    with pytest.raises(
        CheckpointError, match=r"lacks tensor 'candidate_selector\.predecessor_codebook'"
    ):
        load_block(published(tmp_path / "c", settings, **alone), H, V, TARGET_LAYERS)
    with pytest.raises(CheckpointError, match="selector_top_k is 99; this target has 13"):
        load_block(
            published(tmp_path / "d", {**settings, "selector_top_k": 99}, **parts),
            H,
            V,
            TARGET_LAYERS,
        )
    with pytest.raises(CheckpointError, match="3 taps and 4 groups do not fit blocks of 2"):
        load_block(
            published(tmp_path / "e", {**settings, "block_size": 2}, **parts), H, V, TARGET_LAYERS
        )
    with pytest.raises(CheckpointError, match="does not say 'selector_top_k'"):
        load_block(
            published(tmp_path / "f", {**settings, "selector_top_k": None}, **parts),
            H,
            V,
            TARGET_LAYERS,
        )


def test_messages_say_what_does_not_fit(tmp_path: Path) -> None:
    folder = published(tmp_path / "a", {"base_model_name_or_path": "Qwen/Qwen3-4B"})
    with pytest.raises(
        CheckpointError,
        match=r"trained for 'Qwen/Qwen3-4B'\).*'fc.weight' reads 32 numbers.*have 64",
    ):
        load_block(folder, 32, V, TARGET_LAYERS)
    with pytest.raises(
        CheckpointError, match=r"8 layers; this one has 9. It was trained for another target"
    ):
        load_block(folder, H, V, 9)
    with pytest.raises(CheckpointError, match="mask_token_id 5 is no token"):
        load_block(folder, H, 4, TARGET_LAYERS)
    for number, gap in enumerate(("mask_token_id", "target_layer_ids")):
        values = {"mask_token_id": 5, "target_layer_ids": [1, 5]}
        del values[gap]
        with pytest.raises(CheckpointError, match=gap):
            load_block(
                published(tmp_path / f"gap{number}", {"dflash_config": values}), H, V, TARGET_LAYERS
            )
    with pytest.raises(CheckpointError, match="no head folder"):
        load_block(tmp_path / "nowhere", H, V, TARGET_LAYERS, outline=True)
