"""MTP heads inside GGUF files draft what the same head drafts from a folder of safetensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Exaone4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    NemotronHConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from outrider.build import Built, Options, build, head_in
from outrider.cli import main
from outrider.errors import CheckpointError
from outrider.lab.tune.drafts import read_drafts
from outrider.models.gguf.header import read_gguf
from outrider.models.gguf.linear import BlockExperts, BlockLinear, block_layers
from outrider.models.heads.mtp_files import load_mtp, ships_mtp, weigh_mtp
from outrider.models.loading.load import load_config
from outrider.models.source import resolve
from tests.gguf_files import Kind, write_model
from tests.gguf_heads import (
    PARTS,
    head_tensors,
    parts_of_layer,
    round_matrices,
    write_with_head,
    zeros_of_copies,
)
from tests.helpers import word_tokenizer
from tests.mtp_heads import MtpReference, save_with_mtp
from tests.unit.drafters.heads.test_mtp import watched, write
from tests.unit.models.gguf.test_loading import DELTA_NET, DELTA_NET_KEYS, SIZES, made
from tests.unit.models.gguf.test_routed import (
    EXPERTS,
    LATENTS,
    LING,
    LING_KEYS,
    ROUTED,
    joined,
    metadata,
    nemotron_tensors,
)

EVEN = {**ROUTED, "num_hidden_layers": 2, "num_experts_per_tok": 2}
MIXED = {"num_experts": EXPERTS, "num_experts_per_tok": EXPERTS, "moe_intermediate_size": 32}
MIXED |= {"shared_expert_intermediate_size": 32}
HYBRID = {**DELTA_NET, "num_hidden_layers": 2}
MIXED_KEYS = {
    "expert_count": EXPERTS,
    "expert_used_count": EXPERTS,
    "expert_feed_forward_length": 32,
}
MIXED_KEYS |= {"expert_shared_feed_forward_length": 32}
NEXT = {key: value for key, value in HYBRID.items() if key != "rope_parameters"} | {
    "partial_rotary_factor": 0.25
}
NEMOTRON = {
    "layers_block_type": ["mamba", "attention", "moe"], "num_hidden_layers": 3, "head_dim": 16, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64, "n_routed_experts": EXPERTS, "num_experts_per_tok": EXPERTS,
    "routed_scaling_factor": 2.5, "n_shared_experts": 1, "layer_norm_epsilon": 1e-5, "initializer_range": 0.1,
}  # fmt: skip
NEMOTRON_KEYS = {
    "attention.head_count": 4, "attention.head_count_kv": [0, 2, 0, 2], "feed_forward_length": [0, 0, 32, 32],
    "attention.layer_norm_rms_epsilon": 1e-5, "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2,
    "ssm.time_step_rank": 8, "ssm.inner_size": 128, "attention.key_length": 16, "expert_count": EXPERTS,
    "expert_used_count": EXPERTS, "expert_feed_forward_length": 32, "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 64, "expert_weights_norm": True, "expert_weights_scale": 2.5,
}  # fmt: skip
# architecture, layout, config, sizes, metadata
FAMILIES: dict[str, tuple[str, str, type, dict[str, Any], dict[str, Any]]] = {
    "glm4moe": ("glm4moe", "deepseek", Glm4MoeConfig, {
        **EVEN, "head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": True, "norm_topk_prob": True,
    }, {}),
    "deepseek v3": ("deepseek2", "deepseek", DeepseekV3Config, {**EVEN, **LATENTS, "norm_topk_prob": True}, {}),
    "glm 4.7 flash": ("deepseek2", "deepseek", Glm4MoeLiteConfig, {**EVEN, **LATENTS, "norm_topk_prob": True}, {}),
    "ling": ("bailingmoe2", "deepseek", Glm4MoeConfig, {**LING, "num_hidden_layers": 2}, LING_KEYS),
    "qwen35": ("qwen35", "qwen", Qwen3_5TextConfig, HYBRID, DELTA_NET_KEYS),
    "qwen35moe": (
        "qwen35moe", "qwen", Qwen3_5MoeTextConfig, {**HYBRID, **MIXED},
        {key.replace("qwen35", "qwen35moe"): value for key, value in DELTA_NET_KEYS.items()}
        | {f"qwen35moe.{key}": value for key, value in MIXED_KEYS.items()},
    ),
    "qwen3next": (
        "qwen3next", "qwen", Qwen3NextConfig, {**NEXT, **MIXED},
        {key.replace("qwen35", "qwen3next"): value for key, value in DELTA_NET_KEYS.items() if "sections" not in key}
        | {f"qwen3next.{key}": value for key, value in MIXED_KEYS.items()},
    ),
    "exaone 4": ("exaone4", "qwen", Exaone4Config, {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "initializer_range": 0.1,
    }, {"exaone4.attention.sliding_window": 64, "exaone4.attention.sliding_window_pattern": [True, False]}),
    "nemotron": (
        "nemotron_h_moe", "nemotron", NemotronHConfig, NEMOTRON,
        {f"nemotron_h_moe.{key}": value for key, value in NEMOTRON_KEYS.items()},
    ),
}  # fmt: skip


def random_model(config: type, sizes: dict[str, Any], kind: Kind, seed: int) -> Any:
    model = made(config, seed=seed, **sizes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) / 10)
    if kind is not Kind.F32:
        round_matrices(model, kind)
    return model


def written(
    folder: Path, name: str, *, kind: Kind = Kind.F32, num_layers: int = 1, norm: bool = True
) -> tuple[MtpReference, Path, Path]:
    """A reference, its folder of safetensors, and its file. `norm`: the head has a norm of its own
    before the output."""
    architecture, layout, config, sizes, changes = FAMILIES[name]
    make: Callable[[int], Any] = partial(random_model, config, sizes, kind)
    reference = save_with_mtp(folder / "saved", make, layout, num_layers=num_layers)
    word_tokenizer(SIZES["vocab_size"]).save_pretrained(folder / "saved")
    if kind is not Kind.F32:
        for parts in reference.layers:
            round_matrices(parts["projection"], kind)
    if layout == "deepseek" and not changes:
        changes = metadata(architecture, reference.target.config) | {
            f"{architecture}.expert_used_count": 2
        }
    count = reference.target.config.num_hidden_layers
    own = dict[str, Any]()
    if layout == "nemotron":
        head = {
            **nemotron_head(make(11), kind),
            **parts_of_layer(reference.layers[0], count, architecture),
        }
        own = nemotron_tensors(reference.target, kind)
    else:
        donors = [make(11 + index) for index in range(num_layers)]
        head = {
            **head_tensors(reference, donors, architecture),
            **zeros_of_copies(reference, count),
        }
    if name == "ling":  # whose norm before the output is called otherwise
        own = joined(reference.target)
        head[f"blk.{count}.attn_qkv.weight"] = list(joined(make(11)).values())[-1]
        head[f"blk.{count}.layer_output_norm.weight"] = head.pop(
            f"blk.{count}.nextn.shared_head_norm.weight"
        )
    without = () if norm else (f"blk.{count}.nextn.shared_head_norm.weight",)
    if layout == "qwen":  # which has norms and projection once
        without += tuple(
            f"blk.{count + index}.nextn.{part}.weight"
            for index in range(1, num_layers)
            for part in PARTS
        )
    path = write_with_head(
        folder / "model.gguf",
        reference,
        head,
        architecture,
        kind=kind,
        tensors=own,
        changes=changes,
        leave_out=without,
    )
    return reference, folder / "saved", path


def nemotron_head(donor: Any, kind: Kind) -> dict[str, Any]:
    """The donor's last two blocks, attention and experts, in one block of the file."""
    found = nemotron_tensors(donor, kind)
    norms = {
        "attn_norm": donor.model.layers[1].norm,
        "post_attention_norm": donor.model.layers[2].norm,
    }
    own = {
        f"blk.3.{name.split('.', 2)[2]}": value
        for name, value in found.items()
        if name.startswith(("blk.1.", "blk.2."))
    }
    return own | {
        f"blk.3.{name}.weight": norm.weight.detach().numpy() for name, norm in norms.items()
    }


def built(path: Path, runtime: str = "eager", dtype: str = "float32", **options: Any) -> Built:
    return build(
        Options(
            target=str(path), dtype=dtype, threads=1, num_draft_tokens=3, runtime=runtime, **options
        )
    )


def runtime_of(name: str) -> str:
    """Nemotron-H's layers run on the native runtime alone."""
    return "native" if name == "nemotron" else "eager"


def drafts(
    path: Path, runtime: str = "eager", **options: Any
) -> tuple[list[tuple[list[int], list[int]]], list[list[int]]]:
    """Every (text, draft) of a batch, and its texts."""
    run = built(path, runtime, **options)
    seen = watched(run)
    return seen, [row.output for row in write(run)]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_drafts_what_its_folder_drafts(tmp_path: Path, name: str) -> None:
    """Catches norms or rows that keep the converter's order, a block of another layer, and parts of
    the projection swapped."""
    reference, folder, path = written(tmp_path, name)
    assert ships_mtp(str(path))
    runtime = runtime_of(name)
    seen, texts = drafts(path, runtime)  # `auto`
    assert sum(len(draft) for _, draft in seen) > 60
    assert all(not draft or draft == reference.draft(text, len(draft))[0] for text, draft in seen)
    assert (seen, texts) == drafts(folder, runtime, drafter="mtp")
    assert texts == [row.output for row in write(built(path, runtime, drafter="none"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "nemotron"])
def test_blocks_draft_what_the_rounded_weights_draft(tmp_path: Path, name: str) -> None:
    """The head's weights stay in blocks where the target's do; in fp32 they are widened without a
    loss."""
    reference, _, path = written(tmp_path, name, kind=Kind.Q8_0)
    run = built(path, drafter="mtp")
    head = run.decoder.drafter.lm.head  # type: ignore[attr-defined]
    assert isinstance(head.layer(0).projection, BlockLinear)
    kinds = [type(layer) for layer in block_layers(head.layer(0).body)]
    assert BlockLinear in kinds
    assert (BlockExperts in kinds) is (name not in ("qwen35", "exaone 4"))
    seen = watched(run)
    texts = [row.output for row in write(run)]
    assert sum(len(draft) for _, draft in seen) > 60
    assert all(not draft or draft == reference.draft(text, len(draft))[0] for text, draft in seen)
    assert texts == [row.output for row in write(built(path, drafter="none"))]


@pytest.mark.slow
def test_blocks_of_a_hybrid_draft_on_the_native_runtime(tmp_path: Path) -> None:
    """Nemotron-H's blocks run there alone, in bfloat16."""
    _, _, path = written(tmp_path, "nemotron", kind=Kind.Q8_0)
    options: dict[str, Any] = {"runtime": "native", "dtype": "bfloat16"}
    seen, texts = drafts(path, drafter="mtp", **options)
    assert sum(len(draft) for _, draft in seen) > 60
    assert texts == [row.output for row in write(built(path, drafter="none", **options))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm4moe", "qwen35"])
def test_several_layers_take_turns(tmp_path: Path, name: str) -> None:
    """Qwen's files have norms and projection once, others in each layer."""
    reference, folder, path = written(tmp_path, name, num_layers=2)
    seen, texts = drafts(path)
    assert sum(len(draft) for _, draft in seen) > 40
    assert all(not draft or draft == reference.draft(text, len(draft))[0] for text, draft in seen)
    assert (seen, texts) == drafts(folder, drafter="mtp")
    assert read_drafts(Options(str(path))).heads[0].max_chain == 2


@pytest.mark.slow
def test_a_head_without_a_last_norm_takes_the_targets(tmp_path: Path) -> None:
    reference, _, path = written(tmp_path, "qwen35", norm=False)
    reference.layers[0]["norm"] = reference.target.model.norm
    seen, _ = drafts(path)
    assert sum(len(draft) for _, draft in seen) > 60
    assert all(not draft or draft == reference.draft(text, len(draft))[0] for text, draft in seen)


@pytest.mark.slow
def test_a_file_with_a_head_alone(tmp_path: Path) -> None:
    """llama.cpp's converter makes one with --mtp. `--draft` names it, beside a file or a folder
    with the target."""
    reference, folder, path = written(tmp_path, "glm4moe")
    whole = read_gguf(path)
    alone = tmp_path / "mtp-model.gguf"
    without = [
        tensor.name for tensor in whole.tensors if tensor.name.startswith(("blk.0.", "blk.1."))
    ]
    _, _, config, sizes, _ = FAMILIES["glm4moe"]
    donors = [random_model(config, sizes, Kind.F32, 11)]
    write_with_head(
        alone,
        reference,
        head_tensors(reference, donors, "glm4moe"),
        "glm4moe",
        leave_out=tuple(without),
        changes=metadata("glm4moe", reference.target.config) | {"glm4moe.expert_used_count": 2},
    )
    assert head_in(str(alone)) == "mtp"
    assert head_in(str(path)) is None
    for target in (folder, path):
        seen, _ = drafts(target, draft=str(alone))
        assert sum(len(draft) for _, draft in seen) > 60
        assert all(
            not draft or draft == reference.draft(text, len(draft))[0] for text, draft in seen
        )
    with pytest.raises(
        CheckpointError,
        match=r"mtp-model.gguf' holds an MTP head and no model. Use it with --draft",
    ):
        built(alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm4moe", "qwen35"])
def test_a_head_in_blocks_runs_natively(tmp_path: Path, library_path: Path, name: str) -> None:
    """In bf16 the kernels multiply its blocks; the text is plain decoding's to the bit, in chains
    and trees."""
    _, _, path = written(tmp_path, name, kind=Kind.Q8_0)
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "threads": 1,
        "num_draft_tokens": 3,
        "runtime": "native",
    }
    plain = [row.output for row in write(build(Options(str(path), drafter="none", **options)))]
    for tree in ("chain", "2x2x1"):
        run = build(Options(str(path), drafter="mtp", drafter_options={"tree": tree}, **options))
        assert run.decoder.drafter.lm.run is not None  # type: ignore[attr-defined]
        assert [row.output for row in write(run)] == plain


def test_what_a_head_weighs(tmp_path: Path) -> None:
    """In blocks and widened, as it is trained."""
    _, _, path = written(tmp_path, "glm4moe", kind=Kind.Q8_0)
    config = load_config(resolve(str(path)))
    head = load_mtp(resolve(str(path)), config, torch.float32, torch.device("cpu"))
    kept = {
        id(value): value.nbytes for value in (*head.layers.parameters(), *head.layers.buffers())
    }
    assert weigh_mtp(resolve(str(path)), config, torch.float32).weights_bytes == sum(
        kept.values()
    ) - tables_bytes(head)
    widened = load_mtp(
        resolve(str(path)), config, torch.float32, torch.device("cpu"), blocks_stay=False
    )
    assert not list(block_layers(widened))
    expected = head.layer(0).projection.weight
    assert torch.equal(widened.layer(0).projection.weight, expected)  # type: ignore[arg-type]


def tables_bytes(head: Any) -> int:
    """Bytes of rotary tables, which no file has."""
    return sum(value.nbytes for name, value in head.layers.named_buffers() if "inv_freq" in name)


@pytest.mark.slow
def test_a_file_without_a_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` drafts by look-up; asked for a head, the command says what it looked for."""
    _, _, path = written(tmp_path, "glm4moe")
    bare = write_model(
        tmp_path / "bare.gguf",
        random_model(*FAMILIES["glm4moe"][2:4], Kind.F32, 0),
        "glm4moe",
        changes=metadata("glm4moe", load_config(resolve(str(path)))),
    )
    assert not ships_mtp(str(bare))
    assert built(bare).options.drafter == "suffix"
    monkeypatch.setattr(
        sys, "argv", ["outrider", "generate", str(bare), "hello", "--drafter", "mtp"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "has no MTP head: none of its tensors is blk.2.nextn.eh_proj.weight, blk.2.nextn.enorm.weight"
        in said
    )


@pytest.mark.slow
def test_a_head_that_lacks_tensors_is_named(tmp_path: Path) -> None:
    reference, _, path = written(tmp_path, "glm4moe")
    donors = [random_model(*FAMILIES["glm4moe"][2:4], Kind.F32, 11)]
    head = head_tensors(reference, donors, "glm4moe")
    for lacking, message in (
        ("blk.2.nextn.hnorm.weight", "is incomplete: it lacks blk.2.nextn.hnorm.weight"),
        ("blk.2.attn_q.weight", "lacks 1 weights, first 'model.layers.0.self_attn.q_proj.weight'"),
    ):
        write_with_head(
            path,
            reference,
            head,
            "glm4moe",
            leave_out=(lacking,),
            changes=metadata("glm4moe", reference.target.config),
        )
        with pytest.raises(CheckpointError, match=message):
            built(path, drafter="mtp")
