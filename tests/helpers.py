"""Small models, tokenizers and rows that tests build for themselves: plain functions, no fixtures,
nothing downloaded.

Two vocabularies: `byte_tokenizer`, whose tokens are single bytes, so that random output is full of
broken and multi-byte characters; and `word_tokenizer`, a dozen words, small enough to enumerate
every continuation. Models are random Llamas saved with `save_pretrained`, so that tests go through
the same door as a user's checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.decode import Decoder
from outrider.drafters.base import Drafter
from outrider.models.picking import Draws, no_draws
from outrider.rows import Row, Rows
from outrider.run import has_ended, run_rows
from outrider.sampling.words import BadWords, Spelling
from outrider.testing import EOS, byte_tokenizer, make_row, tiny_llama, wrapped
from outrider.types import Draft

__all__ = ["EOS", "byte_tokenizer", "make_row", "tiny_llama"]  # of outrider.testing

# glibc hands blocks beyond 32 MiB back to the system, however many it has seen
LARGE_BYTES = 64 << 20


def word_tokenizer(num_tokens: int, *, prefix: str = "w") -> PreTrainedTokenizerFast:
    """`num_tokens` tokens: the end token and the words w1, w2, ..."""
    vocab = {"<|end|>": EOS, **{f"{prefix}{index}": index for index in range(1, num_tokens)}}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<|end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrapped(tokenizer)


def in_bytes(x: Tensor) -> Tensor:
    """Rows as our kernel multiplies them: 32 inputs in 255 steps of their largest; ties to even, as
    the processor rounds."""
    blocks = F.pad(x.float(), (0, -x.shape[1] % 32)).view(x.shape[0], -1, 32)
    largest = blocks.abs().amax(dim=2, keepdim=True)
    # 127 / largest is 127 times a rounded reciprocal
    steps = torch.full_like(largest, 127).div(largest).where(largest > 0, 0)
    return (
        ((blocks * steps).round() * (largest / 127)).view(x.shape[0], -1)[:, : x.shape[1]].double()
    )


def disturbed(model: LlamaForCausalLM, noise: float, seed: int = 1) -> LlamaForCausalLM:
    """A copy with every weight matrix moved by `noise` times its own spread: a draft that is right
    most of the time."""
    copy = LlamaForCausalLM(LlamaConfig(**model.config.to_dict()))
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in copy.parameters():
            if weight.dim() > 1:
                weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * noise)
    return copy.eval()


def widened(model: LlamaForCausalLM, vocab_size: int) -> LlamaForCausalLM:
    """The same model with a padded vocabulary: rows that no tokenizer names, as Qwen's larger
    checkpoints have them."""
    with torch.random.fork_rng():
        # a padded row may be the likeliest: then the target says what no draft can
        torch.manual_seed(0)
        wide = LlamaForCausalLM(
            LlamaConfig(**{**model.config.to_dict(), "vocab_size": vocab_size})
        ).eval()
    weights = wide.state_dict()
    own = model.state_dict()
    for name, weight in own.items():
        weights[name][: weight.shape[0]] = weight
    wide.load_state_dict(weights)
    return wide


def save_checkpoint(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast | None) -> Path:
    """A transformers checkpoint in `folder`."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


class OracleThatErrs(Drafter):
    """Knows what will be emitted, but for a wrong token at a position that wanders from step to
    step."""

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts = texts

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        width = max(gamma)
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        for index, row in enumerate(rows):
            done = len(row.output)
            known = self._texts[row.request][done : done + width]
            tokens[index, : len(known)] = torch.tensor(known)
            if (wrong := done * 7 % (width + 2)) < width:
                tokens[index, wrong] = (tokens[index, wrong] + 1 + done) % rows.vocab_size
        return Draft(tokens, torch.tensor(gamma))


def bad_words(words: Sequence[Sequence[int]], vocab_size: int) -> BadWords:
    """Words as token ids. Every token is one Chinese letter, so a word counts wherever its tokens
    follow one another."""
    letters = [chr(0x4E00 + token) for token in range(vocab_size)]
    return BadWords(
        Spelling([letter.encode() for letter in letters]),
        ["".join(letters[t] for t in word) for word in words],
    )


def run_to_end(decoder: Decoder) -> list[Row]:
    """Step until every row has finished; finished rows leave at once. Rows in the order of their
    numbers."""
    done = [row for stepped in run_rows(decoder, []) for row in stepped if has_ended(row)]
    return sorted(done, key=lambda row: row.request)


def drawn(
    rows: list[int], temperatures: list[float], uniforms: torch.Tensor, vocab_size: int
) -> Draws:
    """These rows draw, with uniforms (R, n); the others are greedy."""
    return greedy_draws(uniforms.shape[1], vocab_size)._replace(
        sampled=torch.tensor(rows),
        temperature=torch.tensor(temperatures),
        drawn=torch.arange(len(rows)),
        uniforms=uniforms,
    )


def greedy_draws(num_tokens: int, vocab_size: int) -> Draws:
    """How a batch of greedy rows draws: not at all."""
    return no_draws(num_tokens, vocab_size, torch.device("cpu"))
