"""Passes on the executor: against the modules they were lowered from, and against themselves in
other company."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from outrider.errors import CapabilityError
from outrider.kv import KVCache, LayerShape
from outrider.models import plan
from outrider.models.lm import LM, PassLimits
from outrider.models.loading.load import build_lm
from outrider.models.plan import plan_pass
from outrider.models.probes.probe import probe_logits, probe_tokens
from outrider.models.probes.sum_order import AttentionKind
from outrider.models.signals import AFTER_NORM
from outrider.runtime import library, run
from outrider.runtime.lower import lower
from outrider.runtime.ops import Code
from outrider.runtime.run import NativeRun
from tests.unit.runtime.families import FAMILIES, make, states_of
from tests.unit.runtime.passes import differences, every_pass
from tests.unit.runtime.samples import NativeAttention, with_sinks

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 8e-2}
CAPTURE = (AFTER_NORM, 0, 1, 2)
FEW = ("llama", "gemma2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")  # of whom more is asked


def on_executor(family: str, dtype: torch.dtype, path: Path) -> tuple[LM, LM]:
    """A model with its passes on the executor, and the same one as it was."""
    module = make(family, dtype)
    plain = build_lm(module, family, dtype, CPU)
    lm = LM(NativeRun(plain, module, lower(module), path), plain.shape, dtype, CPU)
    lm.limits = PassLimits(granularity=1)
    return lm, plain


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_on_the_executor_is_the_modules(
    family: str, dtype: torch.dtype, library_path: Path
) -> None:
    """Catches any operation, function, mask or order of phases that is another in C++ than in
    torch."""
    lm, plain = on_executor(family, dtype, library_path)
    worst = differences(every_pass(lm, states_of(family)), every_pass(plain, states_of(family)))
    assert max(worst.values()) < TOLERANCE[dtype], worst


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FEW)
def test_hidden_states_change_no_other_number(
    family: str, dtype: torch.dtype, library_path: Path
) -> None:
    lm, _ = on_executor(family, dtype, library_path)
    with_states = every_pass(lm, CAPTURE)
    without = every_pass(lm)
    assert all(torch.equal(with_states[what], logits) for what, logits in without.items())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FEW)
@torch.inference_mode()
def test_a_token_has_the_same_bits_in_every_company(
    family: str, dtype: torch.dtype, library_path: Path
) -> None:
    """Catches a sum whose order depends on a pass's width, on other rows, on the cut into passes or
    on the shape of a tree."""
    lm, _ = on_executor(family, dtype, library_path)
    tokens = probe_tokens(lm.shape.vocab_size, 640, CPU)
    lm.kv.add_row()
    whole = lm.forward(tokens[:, :600]).logits
    keys = [store[0, :600].clone() for store in lm.kv.keys]
    for cut in (600, 1, 255, 17, 300, 27):
        start = lm.kv.lengths[0]
        width = min(cut, 600 - start)
        if width:
            assert torch.equal(
                lm.forward(tokens[:, start : start + width]).logits, whole[:, start : start + width]
            )
            lm.kv.advance(0, width)
        if cut == 600:
            lm.kv.truncate(0, 0)
    assert all(
        torch.equal(store[0, :600], before) for store, before in zip(lm.kv.keys, keys, strict=True)
    )
    chain = lm.forward(tokens[:, 600:606]).logits
    alone = lm.forward(tokens[:, 600:601]).logits
    assert torch.equal(alone[:, 0], chain[:, 0])
    # 601 .. 605, another branch in between
    tree = tokens[:, [600, 601, 620, 602, 621, 603, 622, 604, 605]]
    parents = torch.tensor([[-1, -1, 0, 1, 2, 3, 4, 6]])
    assert torch.equal(lm.forward(tree, parents).logits[:, [0, 1, 3, 5, 7, 8]], chain)
    lm.kv.add_row()
    lm.kv.keys[0][1].fill_(3.0)
    assert torch.equal(lm.forward(tokens[:, 600:606].repeat(2, 1)).logits[:1], chain)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        AttentionKind(9, LayerShape(3, 64, 64), None),
        AttentionKind(8, LayerShape(1, 128, 96), None),
        AttentionKind(4, LayerShape(4, 80, 80), 20.0),
        AttentionKind(32, LayerShape(2, 18, 34), None),
        AttentionKind(8, LayerShape(2, 64, 64), None, has_sinks=True),
        AttentionKind(8, LayerShape(2, 18, 34), 20.0, has_sinks=True),
        AttentionKind(6, LayerShape(3, 64, 64), None, has_slopes=True),
        AttentionKind(16, LayerShape(1, 96, 64, True), None),
        AttentionKind(5, LayerShape(1, 50, 34, True), None),
        AttentionKind(70, LayerShape(1, 64, 48, True), 20.0),
    ],
    ids=str,
)
@torch.inference_mode()
def test_attention_is_torchs(kind: AttentionKind, dtype: torch.dtype, library_path: Path) -> None:
    """Catches a lost tail of a head, a wrong group, a range or span that is left out, for prefixes
    on both sides of ends; a sink that is left out of the total, put to it once a span, or taken
    from another head."""
    heads = kind.num_heads
    (kv_heads, size, value_size, in_keys, *_) = astuple(kind.shape)
    softcap = kind.softcap
    attend = NativeAttention(kind, dtype, library_path)
    kv = KVCache([kind.shape], dtype, CPU)
    kv.add_row()
    kv.reserve(1, 1600)
    torch.manual_seed(0)
    kv.keys[0].normal_(std=0.2)
    kv.values[0].normal_()
    for prefix, width in ((0, 1), (63, 2), (511, 7), (1300, 40), (1030, 1)):
        kv.lengths[0] = prefix
        query, key, value = (
            torch.randn(1, count, width, each).to(dtype)
            for count, each in ((heads, size), (kv_heads, size), (kv_heads, value_size))
        )
        found = attend(kv, query, key, value, None).view(width, heads, value_size)
        plan, _ = plan_pass(kv, 1, width, last_position=1 << 20)
        keys, values = (
            store[0][0, : plan.mask.shape[3]]
            .transpose(0, 1)
            .repeat_interleave(heads // kv_heads, 0)
            .float()
            for store in (kv.keys, kv.values)
        )
        values = keys[..., :value_size] if in_keys else values
        scores = query[0].float() @ keys.transpose(1, 2)
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        if (slopes := kind.slopes()) is not None:
            before = torch.arange(keys.shape[1]) - torch.arange(prefix, prefix + width)[:, None]
            scores = scores + slopes[:, None, None] * before
        scores = with_sinks(scores + plan.mask[0, :, :width].float(), kind)
        expected = F.softmax(scores, -1)[..., : keys.shape[1]] @ values
        assert (found.transpose(0, 1) - expected).abs().max() < (
            1e-4 if dtype == torch.float32 else 2e-2
        )


def test_threads_change_no_bit(library_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a sum that is divided among threads: eight of them here, one before."""
    lm, _ = on_executor("llama", torch.bfloat16, library_path)
    alone = every_pass(lm)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    lm, _ = on_executor("llama", torch.bfloat16, library_path)
    assert differences(every_pass(lm), alone) == dict.fromkeys(alone, 0.0)


def test_a_run_that_gives_other_logits_is_refused(
    library_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = make("llama")
    lm = build_lm(module, "llama", torch.float32, CPU)
    program = lower(module)
    before = lm.run
    index = next(index for index, op in enumerate(program.body) if op.code == Code.SILU)
    program.body[index] = replace(program.body[index], code=Code.RELU)
    monkeypatch.setattr(library, "find", lambda cache: library_path)
    monkeypatch.setattr(run, "lower", lambda module: program)
    with pytest.raises(CapabilityError, match="differ"):
        run.use_native_run(lm, module, tmp_path)
    assert lm.run is before


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    module = make("llama").to(torch.float64)
    lm = build_lm(module, "llama", torch.float64, CPU)
    with pytest.raises(CapabilityError, match="float64"):
        run.use_native_run(lm, module, tmp_path)


def test_a_router_that_rounding_changes_is_no_reason_to_refuse(
    library_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In bf16 a token now and then picks other experts than eagerly; a wrong program shows in all
    tokens."""
    module = make("qwen3_moe", torch.bfloat16, picks_all=False)
    lm = build_lm(module, "qwen3_moe", torch.bfloat16, CPU)
    plain = probe_logits(lm)
    monkeypatch.setattr(library, "find", lambda cache: library_path)
    run.use_native_run(lm, module, tmp_path)
    apart = (probe_logits(lm) - plain).abs().amax(-1) / plain.abs().max()
    assert apart.max() > 0.1, "no router picked otherwise: the test shows nothing"
    program = lower(module)
    index = next(index for index, op in enumerate(program.body) if op.code == Code.SILU)
    program.body[index] = replace(program.body[index], code=Code.RELU)
    monkeypatch.setattr(run, "lower", lambda module: program)
    with pytest.raises(CapabilityError, match="differ"):
        run.use_native_run(build_lm(module, "qwen3_moe", torch.bfloat16, CPU), module, tmp_path)


@torch.inference_mode()
def test_a_key_that_is_no_number_reaches_those_who_see_it_alone(library_path: Path) -> None:
    """Catches a maximum or a mask that hides it, and one that lets it through."""
    kind = AttentionKind(6, LayerShape(2, 64, 64), None)
    attend = NativeAttention(kind, torch.bfloat16, library_path)
    kv = KVCache([kind.shape], torch.bfloat16, CPU)
    kv.add_row()
    kv.reserve(1, 600)
    kv.lengths[0] = 300
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 4, 64).bfloat16() for heads in (6, 2, 2))
    key[0, :, 2] = float("nan")
    found = attend(kv, query, key, value, None)
    assert torch.isfinite(found[:2]).all()
    assert found[2:].isnan().all()


@pytest.mark.parametrize("name", ["chain_mask", "tree_mask", "attention_mask"])
def test_passes_make_no_masks(
    name: str, library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks as wide as the text would cost long texts more than the pass's own bookkeeping."""
    lm, _ = on_executor("llama", torch.float32, library_path)
    monkeypatch.setattr(plan, name, lambda *_: pytest.fail(f"{name} was called"))
    for _ in range(2):
        lm.kv.add_row()
    tokens = torch.arange(8).view(2, 4)
    lm.forward(tokens)
    lm.forward(tokens[:1])
    lm.forward(tokens, torch.tensor([[-1, -1, 0], [-1, 0, 1]]))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_pass_tells_how_many_experts_it_read(family: str, library_path: Path) -> None:
    """The distinct ones of each layer, its tokens together, as the module's own routers name them.
    Catches counts of tokens, of rows alone, of one layer, and of passes before."""
    module = make(family, torch.float32)
    plain = build_lm(module, family, torch.float32, CPU)
    lm = LM(NativeRun(plain, module, lower(module), library_path), plain.shape, torch.float32, CPU)
    lm.limits = plain.limits = PassLimits(granularity=1)
    named: list[torch.Tensor] = []
    routers = [
        part for part in module.modules() if type(part).__name__.endswith(("TopKRouter", "Router"))
    ]
    assert len(routers) == plain.shape.num_layers
    for router in routers:
        router.register_forward_hook(lambda _, given, out: named.append(out[-1]))
    for rows, width in ((1, 1), (1, 5), (3, 4)):
        tokens = probe_tokens(plain.shape.vocab_size, rows * width, "cpu").view(rows, width)
        for model in (lm, plain):
            model.kv.clear()
            for _ in range(rows):
                model.kv.add_row()
        named.clear()
        told = lm.forward(tokens).experts
        assert plain.forward(tokens).experts is None, "torch's own code does not tell"
        assert told == sum(len(each.unique()) for each in named) / len(routers)


def test_a_model_without_experts_tells_none(library_path: Path) -> None:
    lm, _ = on_executor("llama", torch.float32, library_path)
    lm.kv.add_row()
    assert lm.forward(torch.ones(1, 3, dtype=torch.int64)).experts is None
