"""A draft whose tokenizer lacks a few of the target's last tokens, or has a few more: it drafts,
and never those.

QwQ's <think> is unknown to Qwen2.5 0.5B. The target still emits it, the text goes on behind it,
greedy texts are plain decoding's and sampled ones have the target's distribution.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from transformers import LlamaForCausalLM

from outrider.errors import CapabilityError
from outrider.llm import LLM
from outrider.models.tokens.vocabulary import check_same_vocabulary, never_draft, tokens_of_one
from outrider.sampling.params import SamplingParams
from tests.helpers import disturbed, save_checkpoint, tiny_llama, widened, word_tokenizer

NUM = 96
LACKING = (94, 95)
QUIET: dict[str, Any] = {"dtype": "float32"}


def speaking(model: LlamaForCausalLM, tokens: tuple[int, ...]) -> LlamaForCausalLM:
    """The same model, which emits these tokens now and then."""
    with torch.no_grad():
        model.lm_head.weight[list(tokens)] *= 2.0
    return model


def cut(model: LlamaForCausalLM, vocab_size: int) -> LlamaForCausalLM:
    """The same model without its last rows."""
    small = tiny_llama(vocab_size)
    with torch.no_grad():
        for ours, theirs in zip(small.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs[: ours.shape[0]])
    return small


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lacking")
    model = speaking(tiny_llama(NUM, sharpness=2.0), LACKING)
    save_checkpoint(root / "full", model, word_tokenizer(NUM))
    # an embedding with rows for the tokens it lacks
    save_checkpoint(root / "padded", model, word_tokenizer(NUM - 2))
    save_checkpoint(root / "cut", cut(model, NUM - 2), word_tokenizer(NUM - 2))  # and one without
    # a draft with tokens of its own
    save_checkpoint(root / "wide", widened(model, NUM + 8), word_tokenizer(NUM + 3))
    return root


PROMPTS = [[3, 4, 5], [94, 7, 95], [95], [9, 95, 94, 95, 8, 94]]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["draft-model", "tree"])
@pytest.mark.parametrize(
    ("target", "draft"), [("full", "padded"), ("full", "cut"), ("padded", "full"), ("full", "wide")]
)
def test_greedy_texts_are_plain_ones(folders: Path, target: str, draft: str, drafter: str) -> None:
    options = (
        {"drafter_options": {"tree": "2x2x1"}} if drafter == "tree" else {"num_draft_tokens": 4}
    )
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    plain = LLM(folders / target, drafter="none", **QUIET).generate(PROMPTS, params)
    llm = LLM(folders / target, draft=folders / draft, **options, **QUIET)
    done = llm.generate(PROMPTS, params)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert sum(one.stats.accepted for one in done) > 0
    emitted = [pair for one in done for pair in zip(one.token_ids, one.origins, strict=True)]
    differing = set(LACKING) if "wide" not in (target, draft) else {96, 97, 98}
    if differing == set(LACKING):
        assert any(token in differing for token, _ in emitted), (
            "the case is not tested: none was emitted"
        )
    assert not [token for token, origin in emitted if token in differing and origin == "accepted"]


@pytest.mark.slow
def test_it_is_reported_once_and_by_name(folders: Path) -> None:
    llm = LLM(folders / "full", draft=folders / "cut", **QUIET)
    assert (
        llm.notes.count(
            f"the draft '{folders / 'cut'}' and the target differ in 2 tokens ('w94', 'w95'): "
            "these are never drafted"
        )
        == 1
    )
    assert not LLM(folders / "full", draft=folders / "full", **QUIET).notes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "verifier"),
    [
        (11, "block"),
        (12, "gumbel"),
        *(
            pytest.param(*pair, marks=pytest.mark.nightly)
            for pair in ((12, "block"), (11, "gumbel"))
        ),
    ],
)
def test_sampled_texts_have_the_targets_distribution(
    width: int, verifier: str, tmp_path: Path
) -> None:
    """Two tokens of 3000 texts against transformers' own probabilities; the draft lacks a token
    that the target likes."""
    model = speaking(tiny_llama(12, sharpness=0.5), (11,))
    target = save_checkpoint(tmp_path / "target", model, word_tokenizer(12))
    other = disturbed(model, 0.1)
    draft = save_checkpoint(
        tmp_path / "draft", other if width == 12 else cut(other, 11), word_tokenizer(11)
    )
    llm = LLM(target, draft=draft, num_draft_tokens=2, verifier=verifier, max_num_seqs=250, **QUIET)
    count = 3000
    params = [
        SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True, seed=number)
        for number in range(count)
    ]
    done = llm.generate([[3, 11]] * count, params)
    assert sum(one.stats.accepted for one in done) > count // 10
    with torch.inference_mode():
        first = model(torch.tensor([[3, 11]])).logits[0, -1].double().softmax(-1)
        second = (
            model(torch.tensor([[3, 11, token] for token in range(12)]))
            .logits[:, -1]
            .double()
            .softmax(-1)
        )
    expected = (first[:, None] * second * count).flatten().tolist()
    seen = Counter(one.token_ids[0] * 12 + one.token_ids[1] for one in done)
    cells = [(seen[cell], many) for cell, many in enumerate(expected) if many >= 10]
    rest = (count - sum(got for got, _ in cells), count - sum(many for _, many in cells))
    g = sum((got - many) ** 2 / many for got, many in [*cells, rest] if many > 1)
    assert stats.chi2.sf(g, len(cells)) > 1e-4


def test_lacking_tokens_have_no_probability(folders: Path) -> None:
    """With a bias of its own, too, and only there."""
    model = tiny_llama(NUM)
    before = model(torch.tensor([[3, 4]])).logits
    never_draft(model, [95, 200])
    after = model(torch.tensor([[3, 4]])).logits
    assert torch.equal(after[..., :95], before[..., :95])
    assert (after.softmax(dim=-1)[..., 95] == 0).all()
    never_draft(model, [94])
    assert (model(torch.tensor([[3, 4]])).logits.softmax(dim=-1)[..., 94:] == 0).all()


def test_who_is_another_tokenizer() -> None:
    """A few tokens at the ends may be absent; an id that says something else is refused, and a
    small part of a vocabulary."""
    assert tokens_of_one(word_tokenizer(96), word_tokenizer(94)) == {94: "w94", 95: "w95"}
    assert tokens_of_one(word_tokenizer(94), word_tokenizer(96)) == {94: "w94", 95: "w95"}
    assert tokens_of_one(word_tokenizer(96), word_tokenizer(96)) == {}
    for draft in (word_tokenizer(96, prefix="v"), word_tokenizer(50)):
        assert tokens_of_one(word_tokenizer(96), draft) is None
        with pytest.raises(CapabilityError, match="has another tokenizer than the target"):
            check_same_vocabulary(word_tokenizer(96), draft, "target", "draft", may_lack=True)
