"""Hidden states out of passes over our cache, against transformers' own `output_hidden_states` of
the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from outrider.errors import CapabilityError, ConfigError
from outrider.models.lm import LM, PREFILL_CHUNK
from outrider.models.loading.load import build_lm
from tests.contract.test_architectures import CONFIGS, make_module
from tests.helpers import tiny_llama

FAMILIES = ("llama", "qwen3", "gemma2", "gpt2", "phi", "opt", "mistral")
CPU = torch.device("cpu")


def subject(name: str) -> tuple[LM, nn.Module]:
    module = make_module(*CONFIGS[name])
    return build_lm(module, name, torch.float32, CPU), module


def keys_of(module: nn.Module) -> tuple[int, ...]:
    return (-1, *range(module.config.get_text_config().num_hidden_layers + 1))


@torch.inference_mode()
def own_states(module: nn.Module, tokens: list[int]) -> dict[int, Tensor]:
    """(T, H) by key, as transformers gives them; behind the last layer it gives only the normed
    ones, so that is left out."""
    module.set_attn_implementation("eager")
    found = module(
        input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True
    ).hidden_states
    module.set_attn_implementation("outrider")
    return {layer: states[0] for layer, states in enumerate(found[:-1])} | {-1: found[-1][0]}


def text_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def same(ours: dict[int, Tensor], expected: dict[int, Tensor], columns: list[int]) -> None:
    """`ours` (T, H) are the expected ones at these positions."""
    for key, states in expected.items():
        torch.testing.assert_close(
            ours[key],
            states[columns],
            rtol=1e-4,
            atol=2e-4,
            msg=lambda text, key=key: f"{key}: {text}",
        )


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_chain_ragged_batch_and_tree(name: str) -> None:
    """Catches a hook on the wrong layer, before the scaling of embeddings, or one that hears only
    the last logit column."""
    lm, module = subject(name)
    capture = keys_of(module)
    texts = [text_of(9, 1), text_of(17, 2)]
    heard: list[tuple[int, int, dict[int, Tensor]]] = []
    for _ in texts:
        lm.kv.add_row()
    lm.catch_up(texts, capture, lambda row, start, hidden: heard.append((row, start, hidden)))
    assert [(row, start) for row, start, _ in heard] == [(0, 0), (1, 0)]
    for (_, _, hidden), text in zip(heard, texts, strict=True):
        same(hidden, own_states(module, text), list(range(len(text) - 1)))
    news = text_of(5, 3)
    # news[1] and news[2] follow the pending token, news[3] the first, news[4] the second
    parents = [-1, -1, 0, 1]
    tokens = torch.tensor([[text[-1], *news[1:]] for text in texts])
    chain = lm.forward(tokens, capture=capture).hidden
    column = torch.zeros(1, dtype=torch.int64)
    tree = lm.forward(tokens, torch.tensor([parents] * 2), columns=column, capture=capture).hidden
    for row, text in enumerate(texts):
        end = len(text) - 1
        same(
            {key: states[row] for key, states in chain.items()},
            own_states(module, text + news[1:]),
            list(range(end, end + 5)),
        )
        for branch in ([0, 1, 3], [0, 2, 4]):
            alone = own_states(module, text + [news[node] for node in branch[1:]])
            same(
                {key: states[row, branch] for key, states in tree.items()},
                alone,
                [end, end + 1, end + 2],
            )


@torch.inference_mode()
def test_behind_the_last_layer_is_before_the_norm() -> None:
    """Catches key L that is already normed, as transformers' own last entry is."""
    lm, module = subject("llama")
    lm.kv.add_row()
    output = lm.forward(torch.tensor([text_of(6)]), capture=(3, -1))
    assert not torch.allclose(output.hidden[3], output.hidden[-1])
    torch.testing.assert_close(module.model.norm(output.hidden[3]), output.hidden[-1])
    torch.testing.assert_close(module.lm_head(output.hidden[-1]), output.logits)


@torch.inference_mode()
def test_long_prompts_padded_and_split_passes() -> None:
    """Catches hidden states that keep their padding, or those of the last of several passes only."""
    lm, module = subject("llama")
    text = text_of(PREFILL_CHUNK + 40)
    module.config.max_position_embeddings = 512
    lm.shape = replace(lm.shape, context_length=512)
    capture = (0, 2)
    lm.limits = replace(lm.limits, granularity=8, max_tokens_per_pass=8)
    heard = []
    lm.kv.add_row()
    lm.catch_up([text], capture, lambda row, start, hidden: heard.append((start, hidden)))
    assert [start for start, _ in heard] == [0, PREFILL_CHUNK]
    whole = {key: torch.cat([hidden[key] for _, hidden in heard]) for key in capture}
    expected = own_states(module, text)
    same(whole, {key: expected[key] for key in capture}, list(range(len(text) - 1)))
    other = text_of(6, 5)
    lm.kv.add_row()
    lm.catch_up([text, other])
    hidden = lm.forward(torch.tensor([[text[-1], 5, 6], [other[-1], 7, 8]]), capture=capture).hidden
    assert {key: tuple(states.shape) for key, states in hidden.items()} == {
        0: (2, 3, 32),
        2: (2, 3, 32),
    }
    expected = own_states(module, [*other, 7, 8])
    same(
        {key: states[1] for key, states in hidden.items()},
        {key: expected[key] for key in capture},
        [5, 6, 7],
    )


@torch.inference_mode()
def test_nobody_listens_nothing_is_kept_and_no_bit_changes() -> None:
    """Catches hooks that stay behind, and passes whose logits depend on who listens."""
    lm, module = subject("llama")
    lm.kv.add_row()
    tokens = torch.tensor([text_of(7)])
    before = lm.forward(tokens)
    assert before.hidden == {}
    assert torch.equal(lm.forward(tokens, capture=(1, -1)).logits, before.logits)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_keys_that_name_nothing_are_refused() -> None:
    """Catches a head of a deeper model that would read another layer without a word."""
    lm, _ = subject("llama")
    lm.kv.add_row()
    with pytest.raises(ConfigError, match=r"layer 4.*0\.\.2"):
        lm.forward(torch.tensor([[3, 4]]), capture=(4,))


def test_a_model_whose_layers_cannot_be_found_still_decodes() -> None:
    """Catches an error for drafters that read no hidden states, and a wrong layer for those that
    do."""
    module = tiny_llama(96, num_hidden_layers=2)
    module.model.other = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    lm = build_lm(module, "tiny", torch.float32, CPU)
    lm.kv.add_row()
    tokens = torch.tensor([text_of(4)])
    assert lm.forward(tokens).logits.shape[:2] == (1, 4)
    with pytest.raises(CapabilityError, match="2 lists"):
        lm.forward(tokens, capture=(0,))
