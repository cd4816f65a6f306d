"""A suffix tree that grows token by token: how often every piece of text occurred, and what
followed it.

For suffix decoding (arXiv 2411.04975), over one growing text or over many finished ones. The tree
spells every substring of up to `max_depth` tokens; edges are compressed (a node's edge is a slice
of some text, never copied), so there are at most two nodes per token. A node counts how many
substrings took the first token of its edge.

Insertion keeps one point for every current suffix that has occurred before, the longest first. A
new token moves each point on; where the tree has no such continuation, a leaf takes the rest of the
suffix (its edge grows with the text) and the point is done. Points hold all lengths 1..L without a
gap: whatever is repeated, its ends are repeated too. So one token costs at most `max_depth` moves,
usually a handful, and the points are at once the matches of the text's end.

Texts leave in the order they came (`remove`), and then the tree is as if they had never been in it.
That works without bookkeeping because a node's slice is always the latest text that passed it: a
node that outlives a text does not refer to it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

END = -1  # ends every finished text: tells "nothing followed" from "not yet known"


class SuffixNode:
    """One edge, `text[start:end]`, and what lies below it. A leaf's `end` may lie beyond a text
    that still grows."""

    __slots__ = ("children", "count", "end", "ranked", "start", "text")

    def __init__(
        self,
        text: Sequence[int],
        start: int,
        end: int,
        count: int,
        children: dict[int, SuffixNode] | None = None,
    ) -> None:
        self.text = text
        self.start = start
        self.end = end
        self.count = count  # substrings that took the first token of this edge
        self.children = children  # by first token; None for a leaf
        # the count when children were last sorted; see `likeliest`
        self.ranked: tuple[int, list[SuffixNode]] | None = None


# a point in the tree: a node and how many tokens of its edge have been passed, at least 1
Point = tuple[SuffixNode, int]

WIDE = 16  # from this many children on, their order is kept instead of sorted out every time
MAX_RANKED = 8


def likeliest(node: SuffixNode, width: int) -> list[SuffixNode]:
    """Children by falling count, at most `width` and 8 of them, the end of texts left out.

    Wide nodes are sorted again when they have grown by a quarter, so that a look-up's cost does not
    grow with the vocabulary.
    """
    if node.children is None:
        return []
    if len(node.children) < WIDE:
        return _sorted_children(node.children)[:width]
    if node.ranked is None or not node.ranked[0] * 0.8 <= node.count <= node.ranked[0] * 1.25:
        node.ranked = (node.count, _sorted_children(node.children)[:MAX_RANKED])
    return node.ranked[1][:width]


def _sorted_children(children: dict[int, SuffixNode]) -> list[SuffixNode]:
    known = [child for token, child in children.items() if token != END]
    return sorted(known, key=lambda child: -child.count) if len(known) > 1 else known


class SuffixTree:
    """All substrings of at most `max_depth` tokens of the texts put in."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.root = SuffixNode((), 0, 0, 0, {})
        # where the current text's suffixes stand that occurred before; longest first
        self.points: list[Point] = []
        self.changes = 0  # grows with every change: points kept outside are then out of date
        self._growing: list[int] = []  # the text of `extend`

    def extend(self, text: Sequence[int]) -> None:
        """Enter what the tree's one growing text has got since the last call."""
        begin = len(self._growing)
        # a copy: edges are slices of it, so it must never be another list
        self._growing += text[begin:]
        for position in range(begin, len(text)):
            self._enter(self._growing, position, sys.maxsize)

    def add(self, text: Sequence[int]) -> None:
        """Enter a whole finished text, which ends with END and has none before. Not to be mixed
        with `extend`."""
        for position in range(len(text)):
            self._enter(text, position, len(text))
        for node, passed in self.points:  # ended as an earlier text did
            _refer(node, text, len(text) - passed, len(text))
        self.points.clear()

    def remove(self, text: Sequence[int]) -> None:
        """Take out the text that was added before all others still in the tree."""
        for begin in range(len(text) - 1):
            self._remove_suffix(text, begin)
        self.changes += 1

    def _enter(self, text: Sequence[int], position: int, length: int) -> None:
        """One more token; `length` is what the text will have in the end."""
        self.changes += 1
        token = text[position]
        points = self.points
        done = 0
        if token != END:  # nothing follows an end: no suffix begins there
            points.append((self.root, 0))
        for index, (node, passed) in enumerate(points):
            if passed < node.end - node.start:
                if node.text[node.start + passed] == token:
                    points[index] = (node, passed + 1)
                    continue
                self._split(node, passed, sum(other is node for other, _ in points[index:]))
            children = node.children
            assert children is not None, "a leaf ends where its text or the tree does"
            if passed:
                _refer(node, text, position - passed, position)
            child = children.get(token)
            if child is not None:
                child.count += 1
                points[index] = (child, 1)
                continue
            # of this suffix (one more for END, where the text's length decides)
            begin = position + 1 - (len(points) - index)
            children[token] = SuffixNode(text, position, min(begin + self.max_depth, length), 1)
            done += 1
        del points[:done]  # what is new for a suffix is new for every longer one
        if len(points) == self.max_depth:
            node, passed = points.pop(0)
            _refer(node, text, position + 1 - passed, position + 1)

    def _split(self, node: SuffixNode, passed: int, waiting: int) -> None:
        """Cut the edge after `passed` tokens. The node keeps the upper part, so points on it stay
        right.

        `waiting` suffixes on this edge have come no further than the cut.
        """
        cut = node.start + passed
        lower = SuffixNode(node.text, cut, node.end, node.count - waiting, node.children)
        node.end = cut
        node.children = {lower.text[cut]: lower}
        node.ranked = None

    def _remove_suffix(self, text: Sequence[int], begin: int) -> None:
        above = None
        node = self.root
        position = begin
        while node.children is not None:
            child = node.children[text[position]]
            if child.count == 1:
                del node.children[text[position]]
                node.ranked = None
                if above is not None and len(node.children) == 1:
                    _merge(above, node)
                return
            child.count -= 1
            position += child.end - child.start
            above = node
            node = child


def _refer(node: SuffixNode, text: Sequence[int], start: int, end: int) -> None:
    """Makes an edge refer to its occurrence in a later text."""
    node.text = text
    node.start = start
    node.end = end


def _merge(above: SuffixNode, node: SuffixNode) -> None:
    """A node with one child left is no fork any more: the child takes its place, with the longer
    edge."""
    assert above.children is not None
    assert node.children is not None
    (child,) = node.children.values()
    above.children[node.text[node.start]] = child
    above.ranked = None
    child.start -= node.end - node.start


class Matches:
    """Positions of one text's suffixes in a tree that holds other texts; the longest first, like
    `SuffixTree.points`."""

    def __init__(self, tree: SuffixTree) -> None:
        self._tree = tree
        self._changes = -1  # of the tree, when the points were made
        self._position = 0  # tokens [0, _position) have been followed
        self.points: list[Point] = []

    def update(self, text: Sequence[int]) -> None:
        """Follow the text's new tokens; all of its last `max_depth` ones when the tree has changed
        meanwhile."""
        if self._changes != self._tree.changes:
            self.points = []
            self._changes = self._tree.changes
            self._position = max(0, len(text) - self._tree.max_depth)
        for position in range(self._position, len(text)):
            self._follow(text[position])
        self._position = len(text)

    def _follow(self, token: int) -> None:
        moved = []
        for node, passed in [*self.points, (self._tree.root, 0)]:
            if passed < node.end - node.start:
                if node.text[node.start + passed] == token:
                    moved.append((node, passed + 1))
            elif node.children is not None and token in node.children:
                moved.append((node.children[token], 1))
        self.points = moved
