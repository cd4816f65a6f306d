"""DSpark heads of DeepSeek V4, read from the target's checkpoint: against a loop over the whole text, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from outrider.build import Options, build
from outrider.errors import CapabilityError, CheckpointError
from outrider.models.heads.block_files import load_block, outline_block
from outrider.models.heads.block_names import ships_dspark
from outrider.models.heads.block_saving import export_block
from outrider.models.heads.block_v4 import V4BlockHead
from outrider.options import replaced
from outrider.sampling.params import SamplingParams
from tests.contract.own_cache_families import make
from tests.helpers import byte_tokenizer, make_row, run_to_end, save_checkpoint

BLOCK, NOISE, RANK, STAGES = 4, 9, 6, 2
EXPERTS = ("w1", "w2", "w3")


def random_tensors(config: Any) -> dict[str, Tensor]:
    """The tensors under `mtp.`, with the names and shapes that DeepSeek publishes."""
    generator = torch.Generator().manual_seed(3)
    size, dim, heads, streams = config.hidden_size, config.head_dim, config.num_attention_heads, config.hc_mult
    inner, count, vocab = config.intermediate_size, config.n_routed_experts, config.vocab_size

    def linear(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def norm(width: int) -> Tensor:
        return 1 + 0.1 * torch.randn(width, generator=generator)

    found = {"mtp.0.main_proj.weight": linear(size, 2 * size), "mtp.0.main_norm.weight": norm(size)}
    for stage in range(STAGES):
        own = {
            "attn.wq_a.weight": linear(config.q_lora_rank, size), "attn.q_norm.weight": norm(config.q_lora_rank),
            "attn.wq_b.weight": linear(heads * dim, config.q_lora_rank), "attn.wkv.weight": linear(dim, size),
            "attn.kv_norm.weight": norm(dim), "attn.attn_sink": linear(heads),
            "attn.wo_a.weight": linear(config.o_groups * config.o_lora_rank, heads * dim // config.o_groups),
            "attn.wo_b.weight": linear(size, config.o_groups * config.o_lora_rank),
            "attn_norm.weight": norm(size), "ffn_norm.weight": norm(size),
            "ffn.gate.weight": linear(count, size), "ffn.gate.bias": linear(count),
            **{f"ffn.shared_experts.{each}.weight": linear(*_expert(each, inner, size)) for each in EXPERTS},
            **{f"ffn.experts.{e}.{each}.weight": linear(*_expert(each, inner, size)) for e in range(count) for each in EXPERTS},
        }  # fmt: skip
        for part in ("hc_attn", "hc_ffn"):
            width = (2 + streams) * streams
            own |= {f"{part}_fn": linear(width, streams * size), f"{part}_base": linear(width), f"{part}_scale": norm(3)}
        found |= {f"mtp.{stage}.{name}": tensor for name, tensor in own.items()}
    last = f"mtp.{STAGES - 1}."
    found |= {
        f"{last}norm.weight": norm(size), f"{last}hc_head_fn": linear(streams, streams * size),
        f"{last}hc_head_base": linear(streams), f"{last}hc_head_scale": norm(1),
        f"{last}markov_head.markov_w1.weight": linear(vocab, RANK), f"{last}markov_head.markov_w2.weight": linear(vocab, RANK),
        f"{last}confidence_head.proj.weight": linear(1, size + RANK),
    }  # fmt: skip
    return found


def _expert(name: str, inner: int, size: int) -> tuple[int, int]:
    return (size, inner) if name == "w2" else (inner, size)


@pytest.fixture(scope="module")
def target() -> Any:
    return make("deepseek_v4", vocab_size=257, sliding_window=6)


@pytest.fixture(scope="module")
def folder(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the head inside."""
    checkpoint = tmp_path_factory.mktemp("v4") / "target"
    save_checkpoint(checkpoint, target, byte_tokenizer())
    put(checkpoint, random_tensors(target.config))
    return checkpoint


def put(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({**load_file(str(folder / "model.safetensors")), **tensors}, str(folder / "model.safetensors"), {"format": "pt"})
    return with_settings(folder)


def with_settings(folder: Path, **changes: Any) -> Path:
    settings = {"dspark_block_size": BLOCK, "dspark_noise_token_id": NOISE, "dspark_target_layer_ids": [0, 2]}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings, **changes}))
    return folder


def alone(folder: Path, target: Any, tensors: dict[str, Tensor], **changes: Any) -> Path:
    """A folder with a head and the target's config."""
    folder.mkdir()
    target.config.save_pretrained(folder)
    save_file(tensors, str(folder / "model.safetensors"))
    return with_settings(folder, **changes)


def rotated(states: Tensor, positions: Tensor, width: int, theta: float, sign: int = 1) -> Tensor:
    """The last `width` channels of (T, ..., D) turned in pairs of neighbours."""
    angles = positions[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    angles = angles.view(len(positions), *[1] * (states.dim() - 2), width // 2)
    first, second = states[..., -width::2], states[..., -width + 1 :: 2]
    cos, sin = angles.cos(), sign * angles.sin()
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([states[..., :-width], turned], dim=-1)


@torch.no_grad()
def reference(head: V4BlockHead, target: Any, text: list[int]) -> tuple[list[int], Tensor]:
    """Greedy guesses behind a text and their scores, written out over the whole text: no cache, no masks."""
    heard: dict[int, Tensor] = {}
    model, config = target.get_decoder(), target.config
    hooks = [model.layers[i].register_forward_hook(lambda p, a, made, i=i: heard.update({i: made.mean(2)[0]})) for i in (0, 2)]
    model(input_ids=torch.tensor([text[:-1]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    context = head.hidden_norm(head.fc(torch.cat([heard[0], heard[2]], dim=-1)))
    positions = torch.arange(len(text) - 1), torch.arange(len(text) - 1, len(text) - 1 + BLOCK)
    theta, width = config.rope_parameters["main"]["rope_theta"], 2 * head.rotary.main_inv_freq.shape[0]
    states = model.embed_tokens(torch.tensor([text[-1], *[NOISE] * (BLOCK - 1)]))
    streams = states[None, :, None].repeat(1, 1, config.hc_mult, 1)

    def norm(part: Any, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + config.rms_norm_eps) * getattr(part, "weight", 1)

    for layer in head.layers:
        post, comb, x = layer.attn_hc(streams)
        own, x = layer.self_attn, norm(layer.input_layernorm, x[0])
        queries = own.q_b_proj(norm(own.q_a_norm, own.q_a_proj(x))).view(BLOCK, -1, config.head_dim)
        queries = rotated(norm(None, queries), positions[1], width, theta)
        seen = torch.cat([context[-config.sliding_window :], x])
        at = torch.cat([positions[0][-config.sliding_window :], positions[1]])
        keys = rotated(norm(own.kv_norm, own.kv_proj(seen)), at, width, theta)
        scores = torch.einsum("shd,td->sht", queries, keys) * config.head_dim**-0.5
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + own.sinks.exp()[None, :, None])
        mixed = rotated(torch.einsum("sht,td->shd", weights, keys), positions[1], width, theta, sign=-1)
        groups = own.o_a_proj.weight.view(config.o_groups, config.o_lora_rank, -1)
        mixed = torch.einsum("sgd,grd->sgr", mixed.reshape(BLOCK, config.o_groups, -1), groups)
        made = own.o_b_proj(mixed.flatten(1))[None]
        streams = post[..., None] * made[:, :, None] + torch.einsum("bsij,bsid->bsjd", comb, streams)
        post, comb, x = layer.ffn_hc(streams)
        made = layer.mlp(norm(layer.post_attention_layernorm, x))
        streams = post[..., None] * made[:, :, None] + torch.einsum("bsij,bsid->bsjd", comb, streams)
    states = norm(head.norm, head.hc_head(streams)[0])
    tokens, before, rows = [], text[-1], []
    for state in states:
        rows.append(target.lm_head(state) + head.markov_head.markov_w2(head.markov_head.markov_w1(torch.tensor(before))))
        before = int(rows[-1].argmax())
        tokens.append(before)
    return tokens, torch.stack(rows)


def test_drafts_are_those_of_the_loop(target: Any, folder: Path) -> None:
    """Catches a wrong stream, rotation, sink, window, layer of the target, expert or name, and a cache that is another text's."""
    assert ships_dspark(folder)
    options = Options(str(folder), dtype="float32", runtime="eager", threads=1, num_draft_tokens=str(BLOCK))
    built, plain = build(options), build(replaced(options, drafter="none"))
    assert built.options.drafter == "block"
    assert any("block head: 4 tokens in one pass of 2 layers, Markov head, confidence" in note for note in built.notes)
    decoder = built.decoder
    for number, prompt in enumerate(([5, 80, 33, 7, 1, 2, 3, 4, 9, 9, 12], [70, 3])):
        for each in (decoder, plain.decoder):
            each.add(make_row(prompt, SamplingParams(max_tokens=12), seed=number, number=number))
    head = decoder.drafter.head
    assert isinstance(head, V4BlockHead)
    for _ in range(3):
        with torch.inference_mode():
            decoder.catch_up()
            draft = decoder.drafter.propose(decoder.rows, [BLOCK] * 2)
            states, logits = decoder.drafter.context.guess(decoder.rows)
        for index, row in enumerate(decoder.rows):
            tokens, scores = reference(head, target, row.tokens)
            assert draft.tokens[index].tolist() == tokens
            found = head.corrected(logits[index], states[index], torch.tensor([row.tokens[-1], *tokens[:-1]]))
            torch.testing.assert_close(found, scores, rtol=1e-3, atol=1e-4)
        decoder.drafter.context.settle()
        decoder.step()
    assert [row.output for row in run_to_end(decoder)] == [row.output for row in run_to_end(plain.decoder)]
    with pytest.raises(CheckpointError, match=r"under mtp\.\* is DSpark. Use --drafter block"):
        build(replaced(options, drafter="mtp"))


def test_what_cannot_be_read_is_refused(target: Any, tmp_path: Path) -> None:
    """By the name of what is missing, strange, or another target's."""
    config, tensors = target.config, random_tensors(target.config)
    sizes = (config.hidden_size, config.vocab_size, config.num_hidden_layers)
    whole = alone(tmp_path / "whole", target, tensors)
    outline = outline_block(whole, *sizes)
    assert next(outline.parameters()).is_meta
    assert (outline.config.num_guesses, outline.config.markov_rank, outline.config.confidence_bias) == (BLOCK, RANK, False)
    with pytest.raises(CheckpointError, match="hidden_size, vocab_size and num_hidden_layers"):
        load_block(whole, 2 * config.hidden_size, *sizes[1:])
    cases: dict[str, tuple[dict[str, Tensor | None], dict[str, Any], type[Exception]]] = {
        "lacks tensors.*layers.1.self_attn.sinks": ({"mtp.1.attn.attn_sink": None}, {}, CheckpointError),
        "mtp.1.attn.strange is no part": ({"mtp.1.attn.strange": torch.zeros(2)}, {}, CheckpointError),
        "in fp8, but its scales": ({"mtp.0.attn.wkv.weight": tensors["mtp.0.attn.wkv.weight"].to(torch.float8_e4m3fn)}, {},
                                   CheckpointError),
        "is in I8": ({"mtp.0.attn.wkv.weight": torch.zeros(4, 4, dtype=torch.int8)}, {}, CapabilityError),
        "does not say 'dspark_noise_token_id'": ({}, {"dspark_noise_token_id": None}, CheckpointError),
        r"dspark_target_layer_ids \[7\]": ({}, {"dspark_target_layer_ids": [7]}, CheckpointError),
        "DSpark of a 'deepseek_v9'": ({}, {"model_type": "deepseek_v9"}, CapabilityError),
    }  # fmt: skip
    for number, (words, (changed, settings, kind)) in enumerate(cases.items()):
        left = {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}
        with pytest.raises(kind, match=words):
            load_block(alone(tmp_path / str(number), target, left, **settings), *sizes)


def test_fp8_is_widened_by_its_scales(target: Any, tmp_path: Path) -> None:
    config, tensors = target.config, random_tensors(target.config)
    name = "mtp.0.attn.wkv"
    small = (tensors[f"{name}.weight"] * 4).to(torch.float8_e4m3fn)
    folder = alone(tmp_path / "a", target, {**tensors, f"{name}.weight": small, f"{name}.scale": torch.full((1, 1), 0.25)})
    head = load_block(folder, config.hidden_size, config.vocab_size, config.num_hidden_layers)
    assert isinstance(head, V4BlockHead)
    assert isinstance(head.layers[0], v4.DeepseekV4DecoderLayer)
    torch.testing.assert_close(head.layers[0].self_attn.kv_proj.weight, small.float() / 4)
    with pytest.raises(CapabilityError, match="no layout outside its target's checkpoint"):
        export_block(head, tmp_path / "b", "raw")
