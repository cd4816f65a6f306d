"""Our kernels on a real CUDA device: what Triton makes of them computes what the module does, with
bits of each token's own."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.models.graphs import GraphedPass
from outrider.models.lm import LM
from outrider.models.loading.load import build_lm
from outrider.runtime.gpu.run import DeviceRun, device_states, use_device_run
from tests.contract.family_reference import begin, random_text
from tests.contract.own_cache_families import VOCAB
from tests.contract.own_cache_families import make as hybrid
from tests.unit.runtime.families import make
from tests.unit.runtime.passes import differences, every_pass

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ("llama", "qwen3_moe", "gemma2", "gpt2", "deepseek_v3", "apertus", "phi3", "cohere2")
# one of each kind of state
HYBRIDS = ("qwen3_5_text", "kimi_linear", "falcon_h1", "lfm2", "mamba", "minimax")
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compute_what_the_module_does(family: str) -> None:
    module = make(family, torch.bfloat16).to(CUDA)
    lm = build_lm(module, family, torch.bfloat16, CUDA)
    expected = every_pass(lm)
    use_device_run(lm, module)
    assert isinstance(lm.run, DeviceRun)
    worst = differences(every_pass(lm), expected)
    assert max(worst.values()) < 0.1, worst


@pytest.mark.parametrize("family", HYBRIDS)
@torch.inference_mode()
def test_states_are_what_the_module_has(family: str) -> None:
    """Rejections at every depth and trees, each pass recorded and replayed; every logit beside
    transformers' over the text."""
    module = hybrid(family, torch.bfloat16).to(CUDA)
    lm = device_states(build_lm(module, family, torch.bfloat16, CUDA), module)  # type: ignore[arg-type]
    assert isinstance(lm.run, DeviceRun)
    lm.limits = lm.run.find_limits(lm, 64)
    lm.run = GraphedPass(lm.run)

    def check(logits: torch.Tensor, text: list[int]) -> None:
        theirs = module(input_ids=torch.tensor([text], device=CUDA), use_cache=False).logits[
            0, -len(logits) :
        ]
        assert (logits - theirs).abs().max() <= 0.1 * theirs.abs().max()

    texts = [random_text(VOCAB, length, seed=length) for length in (3, 20)]
    parents = torch.tensor([[-1, -1, 0, 2, 1], [-1, 0, 1, 1, -1]], device=CUDA)
    paths = ([0, 1, 3, 4], [0, 1, 2, 4])
    begin(lm, *texts)
    for step in range(16):
        drafts = [
            [text[-1], *random_text(VOCAB, 5, seed=10 * step + row)]
            for row, text in enumerate(texts)
        ]
        in_tree = step % 2 == 0
        kept = 1 + step // 2 % 4
        logits = lm.forward(torch.tensor(drafts, device=CUDA), parents if in_tree else None).logits
        for row, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
            path = paths[row] if in_tree else [0, 1, 2, 3, 4, 5]
            check(logits[row, path], [*text, *(draft[column] for column in path[1:])])
            lm.kv.keep(row, path[:kept])
            text += [*(draft[column] for column in path[1:kept]), 7 + row]
        lm.kv.check_integrity()
    assert len(lm.run.graphs) > 0


@pytest.mark.parametrize("family", HYBRIDS)
def test_states_keep_their_bits(family: str) -> None:
    module = hybrid(family, torch.bfloat16).to(CUDA)
    lm = device_states(build_lm(module, family, torch.bfloat16, CUDA), module)  # type: ignore[arg-type]
    assert isinstance(lm.run, DeviceRun)
    limits = lm.run.find_limits(lm, 64)
    assert limits.exact_rows
    assert limits.exact_trees


@pytest.mark.parametrize(("outputs", "inputs"), [(576, 576), (4096, 14336), (50257, 768), (97, 64)])
def test_a_product_has_the_bits_of_its_token(outputs: int, inputs: int) -> None:
    """Catches a tile or an instruction that sums in another order, for any number of tokens."""
    from outrider.runtime.gpu.products import NARROW, narrow

    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(NARROW, inputs, device=CUDA, dtype=torch.bfloat16)
    multiply = narrow(weight, None)
    whole = multiply(x)
    for count in (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 100):
        assert torch.equal(multiply(x[:count]), whole[:count]), count
    expected = x.double() @ weight.double().t()
    assert ((whole - expected).norm() / expected.norm()).item() < 1e-2


def _large_enough() -> LM:
    """A model whose attention has several parts and whose rows share programs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=4096,
        max_position_embeddings=4096,
    )
    with CUDA:
        module = (
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            .eval()
            .requires_grad_(False)
        )
    lm = build_lm(module, "large enough", torch.bfloat16, CUDA)
    own = use_device_run(lm, module)
    lm.limits = own.find_limits(lm, 128)
    return lm


def test_rows_trees_and_widths_keep_their_bits() -> None:
    limits = _large_enough().limits
    assert limits.exact_rows
    assert limits.exact_trees


@torch.inference_mode()
def test_a_row_has_its_bits_beside_others_far_into_a_text() -> None:
    lm = _large_enough()
    tokens = torch.randint(0, 4096, (8, 700), device=CUDA)
    for _ in range(8):
        lm.kv.add_row()
    lm.catch_up([[*line[: 500 + 20 * row].tolist(), 0] for row, line in enumerate(tokens)])
    together = lm.forward(tokens[:, -8:]).logits
    alone = lm.forward(tokens[:1, -8:]).logits
    one = lm.forward(tokens[:1, -8:-7]).logits
    assert torch.equal(alone[0], together[0])
    assert torch.equal(one[0, 0], together[0, 0])


@torch.inference_mode()
def test_recorded_passes_have_the_bits_of_those_that_are_not() -> None:
    lm = _large_enough()
    tokens = torch.randint(0, 4096, (2, 60), device=CUDA)
    for _ in range(2):
        lm.kv.add_row()
    lm.catch_up([[*line[:40].tolist(), 0] for line in tokens])
    expected = lm.forward(tokens[:, 40:45]).logits
    lm.run = GraphedPass(lm.run)
    for _ in range(3):
        assert torch.equal(lm.forward(tokens[:, 40:45]).logits, expected)
    assert len(lm.run.graphs) == 1
