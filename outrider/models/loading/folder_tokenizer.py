"""The tokenizer of a checkpoint folder, made without transformers where its files say all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outrider.models.loading.checked_files import check_ids
from outrider.models.tokens.model_tokenizer import ModelTokenizer
from outrider.wellformed import load_object, read_text

# transformers' names of the class that takes tokenizer.json as it is
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
# of tokens with a meaning, in transformers' order
NAMED = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
)  # fmt: skip
TEMPLATE = "chat_template"
IDLE = ("tokenizer_class", "model_max_length", "backend", "clean_up_tokenization_spaces")
# files that change what tokenizer.json says, or have a template of their own
OTHERS = (
    "added_tokens.json", "special_tokens_map.json", "chat_template.json", "processor_config.json",
    "preprocessor_config.json", "additional_chat_templates",
)  # fmt: skip


def plain_folder_tokenizer(folder: Path, load_whole: Callable[[], Any]) -> ModelTokenizer | None:
    """The tokenizer that transformers loads from this folder.

    None where a class or a setting may change what tokenizer.json says. `load_whole` loads
    transformers' own. Raises errors of many kinds for damaged files.
    """
    settings = load_object(folder / "tokenizer_config.json")
    if (
        settings.get("tokenizer_class") not in PLAIN_CLASSES
        or type(settings.get("model_max_length", 0)) is not int
        or settings.get("clean_up_tokenization_spaces")
        or settings.keys() - {*IDLE, *NAMED, TEMPLATE}
        or any((folder / name).exists() for name in OTHERS)
    ):
        return None
    named = {name: settings[name] for name in NAMED if settings.get(name) is not None}
    file = folder / f"{TEMPLATE}.jinja"
    template = read_text(file, f"'{file}'") if file.exists() else settings.get(TEMPLATE)
    check_ids(folder / "tokenizer.json")
    text = read_text(folder / "tokenizer.json", "the tokenizer")
    try:
        backend = Tokenizer.from_str(text)
    except Exception as error:  # of no kind of its own
        raise ValueError(f"tokenizer.json is damaged: {error}") from error
    if backend.padding is not None or backend.post_processor is None:
        return None  # transformers takes a token from the one, and makes the other anew
    backend.no_truncation()
    ids = {token.content: number for number, token in _special(backend).items()}
    if not (template is None or isinstance(template, str)) or any(
        not isinstance(text, str) or text not in ids for text in named.values()
    ):
        return None
    values = {
        "bos_token_id": ids.get(named.get("bos_token")),
        "eos_token_id": ids.get(named.get("eos_token")),
        "all_special_ids": list(dict.fromkeys(ids[text] for text in named.values())),
        "special_tokens_map": named,
        "chat_template": template,
    }
    return ModelTokenizer.around(backend, values, load_whole)


def _special(backend: Tokenizer) -> dict[int, Any]:
    """The tokens that are matched whole and left out of texts, by id."""
    added = backend.get_added_tokens_decoder()
    return {number: token for number, token in added.items() if token.special}
