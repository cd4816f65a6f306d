"""Completes phrases: once a text has begun one of the user's phrases, the rest of it is drafted.

Names of products and laws, form letters, disclaimers: whoever writes them once writes them again,
word for word, and a list of them is quickly made. The list becomes a trie of tokens. Per row we
keep the prefixes in the trie that the end of the text stands at (all beginnings of phrases that the
text ends with); what lies below them is the draft.

Lossless without further thought: a draft depends on committed text only, and its nodes are placed,
not drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from outrider.drafters.base import Drafter, DraftSetup
from outrider.drafters.requirements import Requirements
from outrider.errors import ConfigError
from outrider.rows import PerRow, Row, Rows
from outrider.settings import checked, setting
from outrider.trees.token_tree import TokenTree, to_draft
from outrider.types import Draft, TargetOutput, Verdict

COMMON = Path(__file__).with_name("common.txt")
# per step, when the user names no number
CHAIN_TOKENS = 8
TREE_NODES = 16


@checked()
@dataclass(frozen=True)
class PhraseSettings:
    """Options of drafter 'phrases'."""

    file: str = setting("common", "text file of phrases, one a line; 'common': a few English ones")
    min_match: int = setting(
        2, "tokens of a phrase that must stand in the text before its rest is drafted", at_least=1
    )
    tree: bool = setting(
        False, "draft every phrase that fits, as branches, instead of the first one"
    )

    def __post_init__(self) -> None:
        self.phrases()

    def phrases(self) -> list[str]:
        """The lines of the file. Raises ConfigError."""
        path = COMMON if self.file == "common" else Path(self.file).expanduser()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"phrases: file must be a text file with one phrase a line; '{path}': {error}"
            ) from error
        phrases = [line.strip() for line in lines if line.strip()]
        if not phrases:
            raise ConfigError(f"phrases: '{path}' has no phrases; write one a line")
        return phrases


class PhraseTrie:
    """All phrases, their common beginnings shared. A prefix is a beginning of a phrase; prefix 0 is
    the empty one."""

    def __init__(self, phrases: Iterable[list[int]]) -> None:
        # of each prefix: token -> prefix, in the order of the phrases
        self.following: list[dict[int, int]] = [{}]
        self.depth = [0]  # tokens of each beginning
        for tokens in phrases:
            self._enter(tokens)

    def _enter(self, tokens: list[int]) -> None:
        prefix = 0
        for token in tokens:
            if token not in self.following[prefix]:
                self.following[prefix][token] = len(self.following)
                self.following.append({})
                self.depth.append(self.depth[prefix] + 1)
            prefix = self.following[prefix][token]


@dataclass
class _Reading:
    """How one row's text ends."""

    num_read: int = 0  # tokens of the text that were read
    # beginnings of phrases that the text ends with, longest first
    prefixes: list[int] = field(default_factory=list)

    def read(self, tokens: list[int], trie: PhraseTrie) -> None:
        """Read what the text has gained."""
        for token in tokens[self.num_read :]:
            following = (trie.following[prefix].get(token) for prefix in [*self.prefixes, 0])
            self.prefixes = [prefix for prefix in following if prefix is not None]
        self.num_read = len(tokens)


class PhraseDrafter(Drafter):
    """Completes the user's phrases."""

    needs = "phrases (file=PATH), or those it brings"
    shape = "chain or tree"
    Settings = PhraseSettings

    def __init__(self, trie: PhraseTrie, settings: PhraseSettings) -> None:
        self._trie = trie
        self._settings = settings
        self._readings = PerRow[_Reading]()  # one per row of the batch, in its order

    @classmethod
    def requirements(cls, settings: PhraseSettings) -> Requirements:
        return Requirements(
            trees=settings.tree, num_draft_tokens=TREE_NODES if settings.tree else CHAIN_TOKENS
        )

    @classmethod
    def build(cls, setup: DraftSetup) -> PhraseDrafter:
        tokenizer = setup.target.tokenizer
        if tokenizer is None:
            raise ConfigError(
                f"drafter 'phrases' needs the tokenizer of '{setup.target.name}', which has none"
            )
        # most tokenizers write a word in the middle of a line otherwise than at its beginning:
        # enter both
        texts = [text for phrase in setup.settings.phrases() for text in (phrase, " " + phrase)]
        trie = PhraseTrie(tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        return cls(trie, setup.settings)

    def start(self, row: Row) -> None:
        self._readings.append(_Reading())
        self._readings[-1].read(row.tokens, self._trie)

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        trees = [
            self._tree(reading.prefixes, budget)
            for reading, budget in zip(self._readings, gamma, strict=True)
        ]
        return to_draft(trees, rows.device, nested=True)

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        for reading, row in zip(self._readings, rows, strict=True):
            reading.read(row.tokens, self._trie)

    def _tree(self, prefixes: list[int], budget: int) -> TokenTree:
        """At most `budget` nodes below these prefixes, nearest first: they are the likeliest to be
        kept."""
        tree = TokenTree()
        matches = [
            prefix for prefix in prefixes if self._trie.depth[prefix] >= self._settings.min_match
        ]
        waiting = deque(
            (-1, token, prefix) for match in matches for token, prefix in self._ways(match)
        )
        if not self._settings.tree:
            waiting = deque(list(waiting)[:1])
        while waiting and len(tree) < budget:
            parent, token, prefix = waiting.popleft()
            node = tree.add(parent, token)
            waiting.extend((node, following, below) for following, below in self._ways(prefix))
        return tree

    def _ways(self, prefix: int) -> list[tuple[int, int]]:
        """(token, prefix) of how phrases go on: all of them in a tree, the first one in a chain."""
        ways = list(self._trie.following[prefix].items())
        return ways if self._settings.tree else ways[:1]
