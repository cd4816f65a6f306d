"""The tokenizer of a GGUF checkpoint, with its chat template.

A vocabulary of byte pairs is put together here, with the rule by which its model splits text before
it merges: a file only names that rule, and transformers takes GPT-2's for names it does not know
(SmolLM's, StarCoder's), which gives other tokens. A rule that nobody knows is refused. Of a
SentencePiece vocabulary the merges are transformers' to recover; blanks and special tokens are
treated as in llama.cpp, whose own vocabularies and ids are the test. A `tokenizer.json` next to the
file is taken instead of all this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from outrider.errors import CapabilityError, CheckpointError
from outrider.lazy import transformers
from outrider.models.gguf.header import GgufFile, long_list
from outrider.models.tokens.model_tokenizer import ModelTokenizer
from outrider.models.tokens.token_bytes import BYTE_OF_LETTER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

FILE = "tokenizer.json"
REMEDY = f"Put the original model's {FILE} and tokenizer_config.json next to the file."
BYTE_PAIRS = "gpt2"  # what files call a vocabulary of byte pairs
# what they call SentencePiece vocabularies
PIECES = "llama"
GEMMA4 = "gemma4"
KINDS = (BYTE_PAIRS, PIECES, GEMMA4)
# types of tokens
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
# of SentencePiece vocabularies whose file names none
PIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
PHI3 = "phi3"  # the architecture whose special tokens take the white space after them, except these
KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")
BLANK = "▁"  # a space in SentencePiece's spelling
ALPHABET = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
_K = "tokenizer.ggml."

# How text is split: regular expressions one after the other, GPT2 being ByteLevel's own; as in the
# models' tokenizer.json.
GPT2 = "gpt2"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_QWEN35 = (  # marks go with their letters
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_LING = (  # a quantifier that gives nothing back is its own
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?" + _UPPER
_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN = (f"{_CASED}*{_LOWER}+|{_CASED}+{_LOWER}*|" + r"\p{N}|" + _ENDS,)
_NO_HAN = r"&&[^\p{Han}]]"
_KIMI = (r"[\p{Han}]+|" + "|".join((
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER[:-1]}{_NO_HAN}*{_LOWER[:-1]}{_NO_HAN}+{_SHORT}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER[:-1]}{_NO_HAN}+{_LOWER[:-1]}{_NO_HAN}*{_SHORT}",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
)),)  # fmt: skip
_GPT4O = (f"{_CASED}*{_LOWER}+{_SHORT}|{_CASED}+{_LOWER}*{_SHORT}|" + r"\p{N}{1,3}|" + _ENDS,)
_CASED_LETTERS = (  # of Unicode when DeepSeek's first tokenizer was made; \p{L&} has more today
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼ"
    "ιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-"
    "𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}+",
)  # fmt: skip
_SINGLE_DIGITS = (r"\p{N}", GPT2)
# rule -> the names that files give it (llama.cpp's llama-vocab.cpp)
_RULES: dict[tuple[str, ...], str] = {
    (GPT2,): (
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4"
    ),
    _SINGLE_DIGITS: "smollm starcoder refact command-r codeshell exaone minerva-7b",
    _QWEN2: "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan",
    _QWEN35: "qwen35",
    _SEED: "seed-coder",
    _LING: "bailingmoe bailingmoe2",
    _LLAMA3: (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe glm4 glm5 chatglm-bpe"
    ),
    _DEEPSEEK_LLM: "deepseek-llm",
    _TEKKEN: "tekken",
    _KIMI: "kimi-k2",
    _GPT4O: "gpt-4o llama4 kanana2 talkie minimax-m2",
    (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ): "deepseek-v3 hunyuan-dense",
    (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"): "falcon",
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"): "deepseek-coder",
}
RULES = {name: rule for rule, names in _RULES.items() for name in names.split()}
# A word that the vocabulary has is one token whatever its merges say; texts begin with the bos
# token where the file does not say.
BEGIN_BY_DEFAULT = frozenset(_RULES[_LLAMA3].split()) - {
    "dbrx",
    "smaug-bpe",
    "glm4",
    "glm5",
    "chatglm-bpe",
} | {"tekken"}
WHOLE_WORDS = BEGIN_BY_DEFAULT | {"glm4", "glm5"}


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer.

    Raises CapabilityError for one that cannot be rebuilt, CheckpointError for a damaged one.
    """
    folder = file.path.parent
    if (folder / FILE).is_file():
        return transformers.AutoTokenizer.from_pretrained(str(folder))
    kind = file.metadata.get(f"{_K}model")
    if kind not in KINDS:
        what = (
            f"a tokenizer of kind '{kind}', which transformers cannot rebuild"
            if kind
            else "no tokenizer"
        )
        raise CapabilityError(f"'{file.path}' has {what}. {REMEDY}")
    rule = file.metadata.get(f"{_K}pre")
    if kind == BYTE_PAIRS and rule not in RULES:
        what = f"names the rule '{rule}'" if rule else "does not say"
        raise CapabilityError(
            f"'{file.path}' {what} by which its tokenizer splits text, and other rules give other "
            f"tokens. {REMEDY}"
        )
    try:
        if kind == BYTE_PAIRS:
            return _byte_pairs(file, str(rule))
        return _gemma4(file) if kind == GEMMA4 else _sentence_pieces(file)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(
            f"'{file.path}' has a damaged tokenizer ({reason}). {REMEDY}"
        ) from error


def plain_tokenizer(file: GgufFile) -> ModelTokenizer | None:
    """The tokenizer that `gguf_tokenizer` gives, made without transformers.

    None for a vocabulary of another kind than byte pairs, one whose named tokens are not matched
    whole, and a file with a tokenizer beside it."""
    rule = file.metadata.get(f"{_K}pre")
    if (
        (file.path.parent / FILE).is_file()
        or file.metadata.get(f"{_K}model") != BYTE_PAIRS
        or rule not in RULES
    ):
        return None
    template = _template(file)
    named = _named_tokens(file, {})
    marked = _tokens_with_kinds(file)
    kinds = dict(marked)
    if not (template is None or isinstance(template, str)) or any(
        text is not None and kinds[text] != CONTROL for text in named.values()
    ):
        return None
    backend = _byte_pair_backend(file, rule, marked)
    ids = {
        name: None if text is None else backend.token_to_id(text) for name, text in named.items()
    }
    bos = named["bos_token"]
    eos = named["eos_token"]
    _frame(backend, bos, eos, file, begins=rule in BEGIN_BY_DEFAULT)
    special = {name: text for name, text in named.items() if text is not None}
    values = {
        "bos_token_id": ids["bos_token"],
        "eos_token_id": ids["eos_token"],
        "all_special_ids": list(dict.fromkeys(ids[name] for name in special)),
        "special_tokens_map": special,
        "chat_template": template,
    }
    return ModelTokenizer.around(backend, values, lambda: gguf_tokenizer(file))


def _byte_pairs(file: GgufFile, rule: str) -> PreTrainedTokenizerFast:
    backend = _byte_pair_backend(file, rule, _tokens_with_kinds(file))
    return _wrapped(backend, file, {}, begins=rule in BEGIN_BY_DEFAULT)


def _byte_pair_backend(file: GgufFile, rule: str, marked: Sequence[tuple[str, int]]) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in long_list(file, f"{_K}merges")]
    vocabulary = {_spelled(text, kind): token for token, (text, kind) in enumerate(marked)}
    backend = Tokenizer(
        models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=rule in WHOLE_WORDS)
    )
    backend.pre_tokenizer = _splitting(RULES[rule])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    _add_marked(backend, marked)
    return backend


def _sentence_pieces(file: GgufFile) -> PreTrainedTokenizerFast:
    """Every piece of text between special tokens begins with a blank, unless the file says
    `add_space_prefix = false`."""
    backend = Tokenizer(_by_transformers(file).backend_tokenizer.model)
    blanks = normalizers.Replace(" ", BLANK)
    to_text: list[Any] = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get(f"{_K}add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), blanks])
        to_text.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = blanks
    backend.decoder = decoders.Sequence(to_text)
    _add_marked(backend, _tokens_with_kinds(file), takes_space=file.architecture == PHI3)
    return _wrapped(backend, file, PIECE_IDS, begins=True)


def _gemma4(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer that transformers makes: texts do not begin with the bos token, which the chat
    template writes."""
    tokenizer = _by_transformers(file)
    tokenizer.chat_template = _template(file)
    return tokenizer


def _by_transformers(file: GgufFile) -> PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast.from_pretrained(
        str(file.path.parent), gguf_file=file.path.name, local_files_only=True
    )


def _tokens_with_kinds(file: GgufFile) -> list[tuple[str, int]]:
    tokens: list[str] = long_list(file, f"{_K}tokens")
    has_kinds = f"{_K}token_type" in file.metadata
    kinds: Sequence[int] = (
        long_list(file, f"{_K}token_type") if has_kinds else [NORMAL] * len(tokens)
    )
    return list(zip(tokens, kinds, strict=True))


def _add_marked(
    backend: Tokenizer, marked: Sequence[tuple[str, int]], *, takes_space: bool = False
) -> None:
    """Match control tokens and those that users defined whole; `takes_space`: with the white space
    after them."""
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for text, kind in marked:
        strips = takes_space and text not in KEEPS_SPACE
        if kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(text, rstrip=strips, normalized=False, special=True))
        elif kind == USER_DEFINED and backend.token_to_id(text) is not None:
            plain.append(AddedToken(text, rstrip=strips, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _wrapped(
    backend: Tokenizer, file: GgufFile, usual_ids: Mapping[str, int], *, begins: bool
) -> PreTrainedTokenizerFast:
    """transformers' tokenizer around ours, with the tokens that the file names; else those of
    `usual_ids`."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **_named_tokens(file, usual_ids),
        chat_template=_template(file),
        clean_up_tokenization_spaces=False,
        model_max_length=file.of_model("context_length") or int(1e30),
    )
    backend = tokenizer.backend_tokenizer
    _frame(backend, tokenizer.bos_token, tokenizer.eos_token, file, begins=begins)
    return tokenizer


def _named_tokens(file: GgufFile, usual_ids: Mapping[str, int]) -> dict[str, str | None]:
    """The tokens that the file names, else those of `usual_ids`, by transformers' names."""
    named: dict[str, str | None] = {"bos_token": None, "eos_token": None}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = file.metadata.get(f"{_K}{key}_token_id", usual_ids.get(key))
        if token is not None:
            named[f"{name}_token"] = long_list(file, f"{_K}tokens")[token]
    return named


def _frame(backend: Any, bos: str | None, eos: str | None, file: GgufFile, *, begins: bool) -> None:
    """Put the bos and eos tokens around texts, as the file says; where it does not say, `begins`:
    the bos token before."""
    before = bos if file.metadata.get(f"{_K}add_bos_token", begins) else None
    after = eos if file.metadata.get(f"{_K}add_eos_token", False) else None
    used = [token for token in (before, after) if token is not None]
    if not used:
        return
    single, two = ([before, f"${name}", after] for name in "AB")
    backend.post_processor = processors.TemplateProcessing(
        single=[part for part in single if part],
        pair=[part for part in (*single, *two) if part],
        special_tokens=[(token, backend.token_to_id(token)) for token in used],
    )


def _spelled(text: str, kind: int) -> str:
    """A token in the alphabet of bytes. Marked tokens are matched in the text as they are."""
    if kind in (CONTROL, USER_DEFINED) or BYTE_OF_LETTER.keys() >= set(text):
        return text
    return "".join(ALPHABET[byte] for byte in text.encode("utf-8"))


def _splitting(rule: Sequence[str]) -> Any:
    steps: list[Any] = [
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if step == GPT2
        else pre_tokenizers.Split(Regex(step), "isolated")
        for step in rule
    ]
    if GPT2 not in rule:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _template(file: GgufFile) -> str | dict[str, str] | None:
    """The chat template; by name where the file has several."""
    template = file.metadata.get("tokenizer.chat_template")
    names = file.metadata.get("tokenizer.chat_templates")
    if not isinstance(names, list):
        return template
    others = {name: file.metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    templates = {"default": template, **others}
    return {name: text for name, text in templates.items() if isinstance(text, str)}
