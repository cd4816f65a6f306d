"""How text is split is part of a tokenizer, and a GGUF file only names it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import CapabilityError, CheckpointError
from outrider.models.gguf.header import read_gguf
from outrider.models.gguf.tokenizer import gguf_tokenizer
from outrider.models.loading.load import load_tokenizer
from outrider.models.source import resolve
from tests.gguf_files import vocabulary, write_model
from tests.helpers import byte_tokenizer
from tests.unit.models.gguf.test_loading import made

TEXT = "It's 2024:\n\n  x+=1é 日本 "


def pieces(path: Path) -> list[str]:
    tokenizer = load_tokenizer(resolve(str(path))).backend_tokenizer
    return [
        "".join(TEXT[start:end])
        for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    ]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("gpt-2", ["It", "'s", " 2024", ":", "\n\n ", " x", "+=", "1", "é", " 日本", " "]),
        (
            "smollm",
            ["It", "'s", " ", "2", "0", "2", "4", ":", "\n\n ", " x", "+=", "1", "é", " 日本", " "],
        ),
        (
            "llama-bpe",
            ["It", "'s", " ", "202", "4", ":\n\n", " ", " x", "+=", "1", "é", " 日本", " "],
        ),
        ("glm4", ["It", "'s", " ", "202", "4", ":\n\n", " ", " x", "+=", "1", "é", " 日本", " "]),
        (
            "deepseek-v3",
            ["It", "'s", " ", "202", "4", ":\n\n", " ", " x", "+=", "1", "é", " ", "日本", " "],
        ),
        (
            "kimi-k2",
            ["It's", " ", "202", "4", ":\n\n", " ", " x", "+=", "1", "é", " ", "日本", " "],
        ),
        (
            "seed-coder",
            [
                "It",
                "'s",
                " ",
                "2",
                "0",
                "2",
                "4",
                ":",
                "\n\n",
                " ",
                " x",
                "+=",
                "1",
                "é",
                " 日本",
                " ",
            ],
        ),
        (
            "bailingmoe2",
            ["It", "'s", " ", "2", "0", "2", "4", ":\n\n", " ", " x", "+=", "1", "é", " 日本", " "],
        ),
        (
            "qwen35",
            ["It", "'s", " ", "2", "0", "2", "4", ":\n\n", " ", " x", "+=", "1", "é", " 日本", " "],
        ),
        (
            "qwen2",
            ["It", "'s", " ", "2", "0", "2", "4", ":\n\n", " ", " x", "+=", "1", "é", " 日本", " "],
        ),
    ],
)
def test_text_is_split_by_the_rule_that_the_file_names(
    tmp_path: Path, rule: str, expected: list[str]
) -> None:
    """The published tokenizers' pieces, written out: transformers alone takes GPT-2's rule for
    names it does not know."""
    assert pieces(write_model(tmp_path / "m.gguf", made(), "llama", pre=rule)) == expected


def test_marks_go_with_their_letters_in_newer_rules(tmp_path: Path) -> None:
    """Thai and Hindi are cut at each mark by Qwen2's rule, not by Qwen3.5's."""
    for rule, expected in (("qwen2", ["ก", "ินข", "้าว"]), ("qwen35", ["กินข้าว"])):
        file = write_model(tmp_path / f"{rule}.gguf", made(), "llama", pre=rule)
        tokenizer = load_tokenizer(resolve(str(file))).backend_tokenizer
        text = "กินข้าว"
        assert [
            text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)
        ] == expected


def test_whole_words_and_begins_follow_the_rule(tmp_path: Path) -> None:
    """Llama 3, Tekken: a word of the vocabulary is a token whatever the merges say, and texts begin
    with the bos token."""
    for rule in ("llama-bpe", "tekken"):
        changes = {"tokenizer.ggml.add_bos_token": None}
        path = write_model(tmp_path / f"{rule}.gguf", made(), "llama", pre=rule, changes=changes)
        tokenizer = load_tokenizer(resolve(str(path)))
        assert tokenizer.backend_tokenizer.model.ignore_merges
        assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    plain = load_tokenizer(
        resolve(str(write_model(tmp_path / "n.gguf", made(), "llama", pre="llama-bpe")))
    )
    assert len(plain("a")["input_ids"]) == 1  # the file says no
    for rule, ignores in (("glm4", True), ("glm5", True), ("chatglm-bpe", False), ("qwen2", False)):
        glm = load_tokenizer(
            resolve(str(write_model(tmp_path / f"{rule}.gguf", made(), "llama", pre=rule)))
        )
        assert glm.backend_tokenizer.model.ignore_merges == ignores
        assert len(glm("a")["input_ids"]) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pre": "some-new-rule"},
            "names the rule 'some-new-rule' by which its tokenizer splits text",
        ),
        ({"pre": None}, "does not say by which its tokenizer splits text"),
        ({"tokenizer": "rwkv"}, "a tokenizer of kind 'rwkv', which transformers cannot rebuild"),
        (
            {"changes": {"tokenizer.ggml.merges": None, "tokenizer.ggml.scores": None}},
            "damaged tokenizer",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_refused(
    tmp_path: Path, changes: dict, message: str
) -> None:
    path = write_model(tmp_path / "m.gguf", made(), "llama", **changes)
    with pytest.raises((CapabilityError, CheckpointError), match=f"{message}.*tokenizer.json"):
        load_tokenizer(resolve(str(path)))


def test_a_tokenizer_beside_the_file_is_taken(tmp_path: Path) -> None:
    """The way out of all of these."""
    path = write_model(tmp_path / "m.gguf", made(), "llama", pre="some-new-rule")
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(resolve(str(path))).get_vocab() == byte_tokenizer().get_vocab()


def test_marked_tokens_are_matched_whole(tmp_path: Path) -> None:
    """Also those that no byte alphabet has, as DeepSeek's; a token that users defined is text, a
    control token is not."""
    tokens, kinds = vocabulary()
    changes = {
        "tokenizer.ggml.tokens": [*tokens, "<｜end▁of▁sentence｜>", "<think>"],
        "tokenizer.ggml.token_type": [*kinds, 3, 4],
        "llama.vocab_size": len(tokens) + 2,
    }
    tokenizer = load_tokenizer(
        resolve(str(write_model(tmp_path / "m.gguf", made(), "llama", changes=changes)))
    )
    ids = tokenizer("a<｜end▁of▁sentence｜><think>")["input_ids"]
    assert ids[1:] == [len(tokens), len(tokens) + 1]
    assert len(tokenizer) == len(tokens) + 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>"


def test_several_templates_have_names(tmp_path: Path) -> None:
    changes = {
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools!",
    }
    tokenizer = load_tokenizer(
        resolve(str(write_model(tmp_path / "m.gguf", made(), "llama", changes=changes)))
    )
    assert set(tokenizer.chat_template) == {"default", "tool_use"}


def sentence_pieces(path: Path, **changes: object) -> Any:
    """The tokenizer of a file with a small SentencePiece vocabulary; `changes`: of the metadata."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "t",
        "h",
        "e",
        "th",
        "▁th",
        "▁the",
        "▁▁",
    ]
    tokens += ["<|user|>", "<|end|>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 8, 3, 4]
    scores = [0.0] * 259 + [-5.0, -6.0, -7.0, -8.0, -1.0, -2.0, -3.0, -4.0, 0.0, 0.0]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.add_bos_token": None,
        "tokenizer.ggml.unknown_token_id": 0,
        "llama.vocab_size": len(tokens),
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return load_tokenizer(
        resolve(str(write_model(path, made(), "llama", changes=metadata, tokenizer="llama")))
    )


def test_sentencepiece_vocabularies_are_rebuilt(tmp_path: Path) -> None:
    """Scores order the merges, unknown characters fall back to bytes, texts begin with the bos
    token."""
    tokenizer = sentence_pieces(tmp_path / "m.gguf")
    assert tokenizer("the é").tokens() == ["<s>", "▁the", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer("the é")["input_ids"], skip_special_tokens=True) == "the é"
    bare = sentence_pieces(tmp_path / "n.gguf", add_space_prefix=False)
    assert bare("th the").tokens() == ["<s>", "th", "▁the"]
    assert bare("<|user|>th").tokens() == ["<s>", "<|user|>", "th"]
    assert bare.decode(bare(" the")["input_ids"], skip_special_tokens=True) == " the"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" the", ["▁", "▁the"]),  # a space of the text's own stays beside the prefix
        ("<|user|>the", ["<|user|>", "▁the"]),
        ("<|user|> the", ["<|user|>", "▁", "▁the"]),
        ("the<|user|>the<|end|>th", ["▁the", "<|user|>", "▁the", "<|end|>", "▁th"]),
        ("the</s><unk>the", ["▁the", "</s>", "<unk>", "▁the"]),
    ],
)
def test_text_after_a_special_token_begins_with_a_blank(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    tokenizer = sentence_pieces(tmp_path / "m.gguf")
    assert tokenizer(text, add_special_tokens=False).tokens() == expected


def test_special_tokens_of_sentencepiece_have_their_usual_ids(tmp_path: Path) -> None:
    """Files of 2023 name none."""
    names = ("bos_token_id", "eos_token_id", "unknown_token_id")
    tokenizer = sentence_pieces(tmp_path / "m.gguf", **dict.fromkeys(names))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        "<s>",
        "</s>",
        "<unk>",
    )


def test_special_tokens_of_phi3_take_the_white_space_after_them(tmp_path: Path) -> None:
    changes = {"general.architecture": "phi3"}
    path = tmp_path / "m.gguf"
    sentence_pieces(path)
    file = read_gguf(path)
    phi3 = gguf_tokenizer(replace(file, metadata=file.metadata | changes))
    ids = phi3("<|user|>\n th<|end|>\n<s> th", add_special_tokens=False)["input_ids"]
    assert phi3.convert_ids_to_tokens(ids) == ["<|user|>", "▁th", "<|end|>", "<s>", "▁", "▁th"]
