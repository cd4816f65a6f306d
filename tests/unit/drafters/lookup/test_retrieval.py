"""Retrieval: the suffix array, the trie, the corpus readers and the index file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.lookup.corpus import PIECE, read_documents
from outrider.drafters.lookup.corpus_index import load_index, open_index, tokenize
from outrider.drafters.lookup.retrieval import RetrievalDrafter, RetrievalSettings, grow
from outrider.drafters.lookup.suffix_array import DEPTH, SEPARATOR, SuffixArray
from outrider.errors import CheckpointError, ConfigError
from outrider.models.loading.load import build_lm
from outrider.parts import choose_parts
from outrider.sampling.params import SamplingParams
from outrider.verifiers.traversal import TraversalVerifier
from tests.helpers import byte_tokenizer, make_row, run_to_end, tiny_llama, word_tokenizer

SETTINGS = {"min_match": 1, "max_match": 8, "branches": 4, "min_share": 0.0}


@pytest.mark.parametrize(("alphabet", "size"), [(2, 300), (5, 300), (1, 90), (300, 50), (2, 1)])
def test_every_occurrence_is_found(alphabet: int, size: int) -> None:
    """Catches a wrong rank in a doubling round, an off-by-one at a run's ends, a match across
    documents."""
    rng = np.random.default_rng(alphabet)
    text = rng.integers(0, alphabet, size)
    text[40::41] = SEPARATOR
    array = SuffixArray.build(text)
    tokens = text.tolist()
    for length in [1, 2, 3, 7, 15, DEPTH]:
        starts = rng.integers(0, max(1, size - length), 30)
        queries = [tokens[at : at + length] for at in starts if length <= size] + [
            rng.integers(0, alphabet, length).tolist()
        ]
        for query in (q for q in queries if SEPARATOR not in q):
            expected = [
                at + length for at in range(size - length + 1) if tokens[at : at + length] == query
            ]
            assert sorted(array.find(query).tolist()) == expected


def test_longest_match_and_what_follows_stay_in_one_document() -> None:
    """Catches a bisection that stops one short, and continuations read on into the next document or
    past the end."""
    array = SuffixArray.build(np.array([1, 2, 3, 4, SEPARATOR, 2, 3, 5, SEPARATOR, 9, SEPARATOR]))
    assert array.longest_match([7, 1, 2, 3], 1) == 3
    assert array.longest_match([4, 2, 3], 1) == 2  # 4 | 2 3 stands across two documents
    assert array.longest_match([7, 3], 2) == 0
    assert array.longest_match([7], 1) == 0
    assert array.followers(array.find([2, 3]), 3).tolist() == [[4, -1, -1], [5, -1, -1]]
    assert array.followers(array.find([9]), 4).tolist() == [[-1] * 4]


def test_trie_takes_the_most_frequent_nodes_first() -> None:
    """Catches counts that are not of the whole path, a child before its parent, and pruning of the
    wrong ones."""
    followers = [[1, 2, 3], [1, 2, 4], [1, 5, -1], [6, 2, 3], [6, -1, -1], [7, 1, 1]]
    tree = grow(followers, 4, branches=3, min_share=0.0)
    assert (tree.tokens, tree.parents) == ([1, 6, 2, 7], [-1, -1, 0, -1])
    assert grow(followers, 9, branches=1, min_share=0.0).tokens == [1, 2, 3]
    assert grow(followers, 9, branches=3, min_share=2 / 6).tokens == [1, 6, 2]
    assert grow(followers, 0, branches=3, min_share=0.0).tokens == []


def _drafter(*documents: list[int], **settings: object) -> RetrievalDrafter:
    text = [token for document in documents for token in [*document, SEPARATOR]]
    chosen = RetrievalSettings(corpus=__file__, **{**SETTINGS, **settings})
    return RetrievalDrafter(SuffixArray.build(np.array(text)), chosen)


def test_a_match_at_a_documents_end_gives_way_to_a_shorter_one() -> None:
    """Catches an empty draft where the longest match has nothing behind it."""
    tree = _drafter([1, 2, 3], [3, 4, 5])._tree([1, 2, 3], 2)
    assert tree.tokens == [4, 5]


def test_occurrences_are_thinned_evenly() -> None:
    """Catches a bound that keeps only the alphabetically first continuations."""
    drafter = _drafter(
        *[[1, token] for token in (5, 6, 7, 8) for _ in range(10)], max_occurrences=4
    )
    assert sorted(drafter._tree([1], 4).tokens) == [5, 6, 7, 8]


def test_a_target_that_says_the_corpus_accepts_it(tmp_path: Path) -> None:
    """Catches drafts made from another occurrence than the one that matched: they would still be
    lossless, and useless."""
    lm = build_lm(tiny_llama(257, sharpness=2.0), "tiny", torch.float32, torch.device("cpu"))
    params = SamplingParams(max_tokens=60)
    prompt = [50, 60, 70]

    def run(drafter: RetrievalDrafter) -> tuple[list[int], float]:
        decoder = Decoder(lm, drafter, TraversalVerifier(), FixedLength(5))
        decoder.add(make_row(prompt, params))
        row = run_to_end(decoder)[0]
        return row.output, row.stats.tau

    plain, slow = run(_drafter([256, 256]))
    assert run(_drafter(prompt + plain)) == (plain, pytest.approx(6, rel=0.1))
    assert slow == pytest.approx(1, rel=0.3)


def test_documents_of_files_and_folders(tmp_path: Path) -> None:
    """Catches a lost piece, a document glued to the next, and files of a folder that are no text."""
    (tmp_path / "sub").mkdir()
    long = "line\n" * (PIECE // 5 + 10)
    (tmp_path / "b.txt").write_text(long)
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "sub" / "c.jsonl").write_text(
        json.dumps({"id": "x", "question": "why", "answer": "so"})
        + "\n\n"
        + json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "ho"},
                ]
            }
        )
    )
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\xff")
    (tmp_path / ".hidden").write_text("secret")
    assert ["".join(pieces) for pieces in read_documents(tmp_path)] == [
        "first",
        long,
        "why\nso",
        "hi\nho",
    ]


def test_half_a_character(tmp_path: Path) -> None:
    """Catches a traceback of the tokenizer: logs cut an emoji in two, which JSON can write and no
    file of text."""
    (tmp_path / "log.jsonl").write_text('{"text": "to be \\ud83d"}\n')
    assert len(tokenize(tmp_path, byte_tokenizer())) == len("to be ?") + 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "is empty"),
        ("binary.txt", b"abc\0def", "not UTF-8 text"),
        ("latin.txt", "é".encode("latin-1"), "not UTF-8 text"),
        ("blank.jsonl", b"\n\n", "there is no text"),
        ("broken.jsonl", b'{"text": "a"}\n{', "line 2 is not JSON"),
        ("fields.jsonl", b'{"id": 3}', "line 1 has no text field, it has: id"),
        ("list.jsonl", b"[1]", "line 1 has no text field, it has: list"),
    ],
)
def test_unusable_corpora_are_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    """Catches a run that starts, and drafts nothing, because its corpus could not be read."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        open_index(
            Path(RetrievalSettings(corpus=str(tmp_path / name)).corpus), None, byte_tokenizer()
        )


def test_what_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    """Catches a missing or misspelt corpus that is noticed only after the models were loaded, and
    ranges not checked."""
    for options, message in (
        ({}, "needs a corpus"),
        ({"corpus": str(tmp_path / "no")}, "there is nothing at"),
        ({"corpus": __file__, "min_match": 5, "max_match": 4}, "min_match <= max_match"),
        ({"corpus": __file__, "max_match": DEPTH + 1}, f"<= {DEPTH}"),
        ({"corpus": __file__, "branches": 0}, "branches"),
        ({"corpus": __file__, "min_share": 1.5}, "min_share"),
    ):
        with pytest.raises(ConfigError, match=message):
            choose_parts("retrieval", options, "auto", {}, None, lossy=False)


def test_index_file_is_used_only_for_what_it_was_made_from(tmp_path: Path) -> None:
    """Catches drafts from a stale index, and a foreign file that is overwritten."""
    corpus = tmp_path / "corpus.txt"
    index = tmp_path / "sub" / "corpus.npz"
    tokenizer = byte_tokenizer()
    corpus.write_text("to be or not to be")
    made = open_index(corpus, index, tokenizer)
    stamp = index.stat().st_mtime_ns
    for again in (open_index(corpus, index, tokenizer), open_index(None, index, tokenizer)):
        assert np.array_equal(again.tokens, made.tokens)
        assert np.array_equal(again.order, made.order)
    assert index.stat().st_mtime_ns == stamp
    corpus.write_text("that is the question")
    assert len(open_index(corpus, index, tokenizer).tokens) == 21
    assert len(load_index(index)[0].tokens) == 21
    with pytest.raises(CheckpointError, match="another tokenizer"):
        open_index(None, index, word_tokenizer(5))
    whole = index.read_bytes()
    for damaged in (whole[:-200], b"", b"something else", whole[:300] + b"\1\2\3\4" + whole[304:]):
        index.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="no usable index"):
            open_index(corpus, index, tokenizer)
        assert index.read_bytes() == damaged
    with pytest.raises(CheckpointError, match="there is no index"):
        open_index(None, tmp_path / "none.npz", tokenizer)


def test_an_index_inside_its_corpus(tmp_path: Path) -> None:
    """Catches an index that is part of what it was made from: it would be made anew at every start."""
    (tmp_path / "text.txt").write_text("to be or not to be")
    index = tmp_path / "corpus.npz"
    open_index(tmp_path, index, byte_tokenizer())
    stamp = index.stat().st_mtime_ns
    open_index(tmp_path, index, byte_tokenizer())
    assert index.stat().st_mtime_ns == stamp


def test_a_long_text_costs_no_warning_and_no_special_tokens(tmp_path: Path) -> None:
    """Catches special tokens put around each piece of a document."""
    (tmp_path / "a.txt").write_text("ab")
    tokenizer = byte_tokenizer()
    assert tokenize(tmp_path / "a.txt", tokenizer).tolist() == [
        *tokenizer("ab")["input_ids"],
        SEPARATOR,
    ]
