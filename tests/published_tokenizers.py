"""Small tokenizers in the shapes that published models have: normalizer, pre-tokenizer and decoder
as in their tokenizer.json.

All have one begin token `<s>` and one end token `</s>`. Those with byte fallback have `\\ufffd` as
a token, too, so that a test can write down what a broken byte should become.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [
    "▁", "▁▁", "▁the", "▁there", "there", "s", "▁cat", ".", ",", "'", "é", "日", "▁日本", "🎉", "\u0301", "\u200d", "a", "b",
    "▁a", "\ufffd", "x<0x41>", "▁▁a", "a▁b",
]  # fmt: skip


def llama_2() -> PreTrainedTokenizerFast:
    """Llama 2, Mistral, TinyLlama: a space in front of every text, which the decoder strips."""
    return _spelled(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ],
    )


def phi_3() -> PreTrainedTokenizerFast:
    """Phi-3 and newer conversions of Llama 2: the space comes from the pre-tokenizer."""
    return _spelled(
        None,
        pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False),
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ],
    )


def gemma() -> PreTrainedTokenizerFast:
    """Gemma: no space in front, nothing stripped."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _spelled(normalizers.Replace(" ", "▁"), None, steps)


def t5() -> PreTrainedTokenizerFast:
    """T5 and XGLM: decoder Metaspace, no bytes."""
    tokenizer = Tokenizer(
        models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in WORDS)], unk_id=0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁")
    tokenizer.decoder = decoders.Metaspace("▁")
    return _wrapped(tokenizer)


def gpt_2() -> PreTrainedTokenizerFast:
    """GPT-2, Qwen2, Llama 3: byte-level BPE. Some tokens end inside a character."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["ðŁ", "ðŁİ", "aâ", "Ġthe", "Ġâ", "æĹ¥"]
    vocab = {token: number for number, token in enumerate([*letters, *merged])}
    tokenizer = Tokenizer(models.BPE(vocab, [("ð", "Ł"), ("ðŁ", "İ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(
        tokenizer,
        AddedToken("<｜tool▁sep｜>", special=False),
        AddedToken("two words", special=False),
    )


def bert() -> PreTrainedTokenizerFast:
    """BERT: WordPiece, whose decoder puts the spaces between words."""
    pieces = [
        "[UNK]",
        "the",
        "re",
        "##re",
        "##s",
        ".",
        ",",
        "'",
        "é",
        "##é",
        "日",
        "cat",
        "##",
        "n't",
    ]
    tokenizer = Tokenizer(
        models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _wrapped(tokenizer)


def words() -> PreTrainedTokenizerFast:
    """No decoder: words joined by spaces."""
    tokenizer = Tokenizer(
        models.WordLevel({"<unk>": 0, "the": 1, "cat": 2, "é": 3, ".": 4}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrapped(tokenizer)


def openai_gpt() -> PreTrainedTokenizerFast:
    """The first GPT: a word's end is marked, and becomes a space when another token follows."""
    vocab = {"<unk>": 0, "the</w>": 1, "the": 2, "re</w>": 3, "cat</w>": 4, "é</w>": 5, ".</w>": 6}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return _wrapped(tokenizer)


class PythonBytes(PreTrainedTokenizer):
    """Tokens that are single bytes, decoded by Python code alone, as tokenizers that come with a
    checkpoint are."""

    def __init__(self, **options: object) -> None:
        self._names = {f"b{byte}": byte for byte in range(256)}
        super().__init__(bos_token="<s>", eos_token="</s>", **options)

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {**self._names, **self._added_tokens_encoder}

    def _tokenize(self, text: str, **options: object) -> list[str]:
        return [f"b{byte}" for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return self._names[token]

    def _convert_id_to_token(self, index: int) -> str:
        return f"b{index}"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        data = b"".join(
            bytes([self._names[token]]) if token in self._names else token.encode()
            for token in tokens
        )
        return data.decode(errors="replace")


WITH_BYTE_FALLBACK: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "llama 2": llama_2,
    "phi 3": phi_3,
    "gemma": gemma,
}
JOINED = {**WITH_BYTE_FALLBACK, "t5": t5, "gpt 2": gpt_2, "bert": bert, "words": words}
OTHERS: dict[str, Callable[[], PreTrainedTokenizer | PreTrainedTokenizerFast]] = {
    "gpt 1": openai_gpt,
    "python": PythonBytes,
}
ALL = {**JOINED, **OTHERS}


def _spelled(
    normalizer: normalizers.Normalizer | None,
    splitter: pre_tokenizers.PreTokenizer | None,
    steps: list[decoders.Decoder],
) -> PreTrainedTokenizerFast:
    """SentencePiece's kind with byte fallback."""
    vocab = {part: number for number, part in enumerate(["<unk>", *BYTE_TOKENS, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Sequence(steps)
    return _wrapped(tokenizer)


def _wrapped(tokenizer: Tokenizer, *added: AddedToken) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True), *added]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
