"""The suffix tree against counting by hand: every substring of every text, after every insertion
and every removal."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from outrider.drafters.lookup.suffix_tree import (
    END,
    WIDE,
    Matches,
    SuffixNode,
    SuffixTree,
    likeliest,
)


def substrings(texts: Sequence[Sequence[int]], max_depth: int) -> Counter[tuple[int, ...]]:
    """How often each substring of at most `max_depth` tokens occurs."""
    found: Counter[tuple[int, ...]] = Counter()
    for text in texts:
        for begin in range(len(text)):
            for end in range(begin + 1, min(len(text), begin + max_depth) + 1):
                found[tuple(text[begin:end])] += text[begin] != END
    return +found


def spelled(tree: SuffixTree) -> dict[tuple[int, ...], int]:
    """The same, read from the tree; on the way: forks have two children, keys are first tokens."""
    found = {}

    def walk(node: SuffixNode, above: tuple[int, ...]) -> None:
        edge = tuple(node.text[node.start : node.end])
        for end in range(1, len(edge) + 1):
            found[above + edge[:end]] = node.count
        for token, child in (node.children or {}).items():
            assert child.text[child.start] == token
            walk(child, above + edge)
        assert node is tree.root or node.children is None or len(node.children) > 1

    walk(tree.root, ())
    return found


def nodes(node: SuffixNode) -> Iterator[SuffixNode]:
    yield node
    for child in (node.children or {}).values():
        yield from nodes(child)


def some_text(rng: random.Random, vocabulary: int, limit: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(rng.randrange(1, limit))]


@pytest.mark.parametrize("max_depth", [2, 3, 7])
@pytest.mark.parametrize("vocabulary", [1, 2, 3])
def test_counts_after_adding_and_removing_texts(max_depth: int, vocabulary: int) -> None:
    """Catches a wrong split, a lost count, a removal that leaves something, and edges that refer to
    texts long gone."""
    rng = random.Random(vocabulary * 10 + max_depth)
    tree = SuffixTree(max_depth)
    texts = list[list[int]]()
    for _ in range(60):
        if texts and rng.random() < 0.45:
            tree.remove(texts.pop(0))
        else:
            texts.append([*some_text(rng, vocabulary, 14), END])
            tree.add(texts[-1])
        assert spelled(tree) == substrings(texts, max_depth)
        assert all(
            any(node.text is text for text in texts)
            for node in nodes(tree.root)
            if node is not tree.root
        )


@pytest.mark.parametrize("max_depth", [2, 3, 7])
@pytest.mark.parametrize("vocabulary", [1, 2, 3])
def test_growing_text(max_depth: int, vocabulary: int) -> None:
    """The points stand at the text's repeated ends, all of them; what is counted at a node's first
    token is exact."""
    rng = random.Random(vocabulary * 10 + max_depth)
    for _ in range(20):
        tree = SuffixTree(max_depth)
        text = list[int]()
        while len(text) < 30:
            text += some_text(rng, vocabulary, 4)
            tree.extend(text)
            expected = substrings([text], max_depth)
            found = spelled(tree)
            assert set(found) == set(expected)
            for node in nodes(tree.root):
                for child in (node.children or {}).values():
                    path = next(p for p in found if _at(tree, p) == (child, 1))
                    assert child.count == expected[path]
            ends = [tuple(text[-length:]) for length in range(max_depth - 1, 0, -1)]
            assert [_at(tree, end) for end in ends if expected[end] > 1] == tree.points


def _at(tree: SuffixTree, path: Sequence[int]) -> tuple[SuffixNode, int]:
    """Where reading `path` from the root ends."""
    node = tree.root
    passed = 0
    for token in path:
        if passed == node.end - node.start:
            assert node.children is not None
            node = node.children[token]
            passed = 0
        assert node.text[node.start + passed] == token
        passed += 1
    return node, passed


def test_matches_follow_a_text_and_notice_a_changed_tree() -> None:
    """Catches points kept from before a split, and matches that begin at the row's first step
    instead of its text."""
    rng = random.Random(0)
    tree = SuffixTree(5)
    text = list[int]()
    matches = Matches(tree)
    past = list[list[int]]()
    for step in range(200):
        if step % 7 == 0:
            past.append([*some_text(rng, 3, 10), END])
            tree.add(past[-1])
        if step % 21 == 0:
            tree.remove(past.pop(0))
        text += some_text(rng, 3, 4)
        matches.update(text)
        known = substrings(past, 5)
        ends = [tuple(text[-length:]) for length in range(min(5, len(text)), 0, -1)]
        assert matches.points == [_at(tree, end) for end in ends if end in known]


def test_at_most_two_nodes_per_token() -> None:
    """Memory: catches edges that are not compressed. A repeated text is where a plain trie
    explodes."""
    text = [random.Random(1).randrange(50) for _ in range(400)]
    tree = SuffixTree(64)
    for _ in range(3):
        tree.add([*text, END])
    assert sum(1 for _ in nodes(tree.root)) <= 2 * (len(text) + 1)


def test_nothing_is_left_of_a_removed_text() -> None:
    """Memory: catches nodes or texts kept alive by a reference somewhere."""

    class Text(list[int]):
        """A list that can be watched."""

    old = Text([1, 2, 3, 1, 2, 4, END])
    new = Text([1, 2, 3, 1, 5, END])
    tree = SuffixTree(4)
    tree.add(old)
    tree.add(new)
    watched = weakref.ref(old)
    tree.remove(old)
    del old
    gc.collect()
    assert watched() is None
    tree.remove(new)
    assert not tree.root.children


def test_likeliest_of_many_children() -> None:
    """The kept order of a wide node must follow its counts, and forget children that left."""
    tree = SuffixTree(3)
    texts = list[list[int]]()

    def add(follower: int, times: int) -> None:
        for _ in range(times):
            texts.append([0, follower, END])
            tree.add(texts[-1])

    def ranking(width: int = 3) -> list[int]:
        assert tree.root.children is not None
        return [child.text[child.start] for child in likeliest(tree.root.children[0], width)]

    add(6, 2)
    for follower in range(10, 10 + 2 * WIDE):
        add(follower, 1 + (follower == 12))
    assert ranking(2) == [6, 12]
    for _ in range(2):
        tree.remove(texts.pop(0))
    assert ranking(1) == [12]
    add(5, 60)
    assert ranking(2) == [5, 12]
    add(7, 40)
    add(8, 45)
    assert ranking() == [5, 8, 7]
    while len(texts) > 46:
        tree.remove(texts.pop(0))
    assert ranking() == [8, 7]
