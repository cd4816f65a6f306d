"""Subword tokenizers of the two great families, trained in-process on a few sentences: for tests
that translate."""

from __future__ import annotations

import json

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

SENTENCES = (
    "the quick brown fox jumps over the lazy dog, and the dog does not mind at all.\n"
    "to be or not to be, that is the question: whether it is nobler in the mind to suffer\n"
    "def fibonacci(number):\n    if number < 2:\n        return number\n    return fibonacci(number - 1)\n"
    "she sells sea shells by the sea shore; the shells she sells are surely sea shells.\n"
)


def byte_level_bpe(
    size: int, *, end: str = "<|end|>", text: str = SENTENCES
) -> PreTrainedTokenizerFast:
    """GPT-2's kind: every byte has a token, `Ġ` is a space. The end token has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


def sentencepiece_bpe(size: int, *, text: str = SENTENCES) -> PreTrainedTokenizerFast:
    """Llama 2's kind: `▁` is a space, one is put before every text, other characters fall back to
    <0x..> bytes."""
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner = Tokenizer(models.BPE())
    learner.normalizer = spaces
    learner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    learner.train_from_iterator(
        text.split("\n"), trainers.BpeTrainer(vocab_size=size - 259, show_progress=False)
    )
    learned = learner.get_vocab()
    parts = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *sorted(learned, key=learned.get),
    ]
    merges = [tuple(merge) for merge in json.loads(learner.to_str())["model"]["merges"]]
    vocab = {part: index for index, part in enumerate(parts)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(part, special=True) for part in ("<unk>", "<s>", "</s>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
        add_bos_token=True,
    )
