"""Medusa heads on the native runtime, against their modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outrider import LLM, SamplingParams
from outrider.models.heads.medusa import MedusaConfig, MedusaHeads, save_medusa
from outrider.runtime.binding import shared_panels
from outrider.runtime.medusa import MedusaRun
from tests.heads import medusa_heads
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama

SIZE = 48
VOCAB = 75


def random_heads(dtype: torch.dtype, **changes: Any) -> MedusaHeads:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        ids = torch.randperm(VOCAB)[:20].sort().values if "draft_vocab_size" in changes else None
        heads = MedusaHeads(MedusaConfig(SIZE, VOCAB, 3, **changes), ids)
        heads.bind(nn.Linear(SIZE, VOCAB, bias=False).to(dtype))
    return heads.requires_grad_(False).to(dtype)


@pytest.mark.parametrize(
    "changes",
    [
        {"own_output": False},
        {"own_output": False, "num_layers": 2, "logit_scale": 0.5},
        {"own_output": True},
        {"own_output": True, "bias": False, "draft_vocab_size": 20},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str
)
def test_logits_are_those_of_the_modules(
    changes: dict[str, Any], dtype: torch.dtype, tolerance: float, library_path: Path
) -> None:
    """Catches a head in another's place, an output layer on another head's states, a scale or a
    vocabulary left out."""
    heads = random_heads(dtype, **changes)
    features = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = heads(features)
    heads.run = run = MedusaRun(heads, library_path)
    torch.testing.assert_close(heads(features), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        heads(features[:, None], 2), expected[:, None, :2], rtol=tolerance, atol=tolerance
    )
    apart = [run(features[row : row + 1]) for row in range(5)]
    assert torch.equal(run(features), torch.cat(apart)), "a row's bits depend on its neighbours"


def test_the_targets_output_layer_is_shared(library_path: Path) -> None:
    """One copy of it in memory, however many heads read it."""
    heads = random_heads(torch.bfloat16, own_output=False)
    output: Any = heads.target_output
    _, panels = shared_panels(output.weight, transposed=False)
    run = MedusaRun(heads, library_path)
    kept = [tensor.data_ptr() for executor in run._outputs for tensor in executor._binding._kept]
    assert kept == [panels.data_ptr()]


@pytest.mark.slow
@pytest.mark.parametrize("own_output", [True, False])
@pytest.mark.parametrize("tree", ["chain", "medusa"])
def test_greedy_text_is_that_of_plain_decoding(
    tree: str, own_output: bool, tmp_path: Path, library_path: Path
) -> None:
    """To the bit, in bfloat16, alone and in a batch."""
    module = tiny_llama(257, sharpness=2.0)
    target = save_checkpoint(tmp_path / "target", module, byte_tokenizer())
    folder = tmp_path / "head"
    if own_output:
        medusa_heads(module, folder)
    else:
        config = MedusaConfig(
            module.config.hidden_size, 257, 3, own_output=False, accuracies=((0.5,), (0.4,), (0.3,))
        )
        save_medusa(MedusaHeads.new(config, module), folder)
    prompts = [[5, 6, 7], [9] * 40, [80, 33]]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    same: dict[str, Any] = {"dtype": "bfloat16", "runtime": "native", "threads": 2}
    plain = LLM(target, drafter="none", **same).generate(prompts, params)
    llm = LLM(target, draft=folder, drafter="medusa", drafter_options={"tree": tree}, **same)
    drafter: Any = llm._built.decoder.drafter
    assert isinstance(drafter.heads.run, MedusaRun)
    assert not any("without the native runtime" in note for note in llm._built.notes)
    assert [one.token_ids for one in llm.generate(prompts, params)] == [
        one.token_ids for one in plain
    ]
    assert llm.generate(prompts[:1], params)[0].token_ids == plain[0].token_ids
