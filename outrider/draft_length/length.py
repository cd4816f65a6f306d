"""`--num-draft-tokens`: a number fixes the draft length, `auto` frees it, `auto:12` frees it up to
12, and `1:5,4:3,16:0` fixes it by load: 5 from one row on, 3 from four rows on, none from sixteen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.errors import ConfigError

MAX_DRAFT_TOKENS = 64
AUTO_MAX_DRAFT_TOKENS = 8
NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class DraftLength:
    """The most nodes a row may get in a step, and whether fewer may be chosen."""

    max_nodes: int
    is_auto: bool = False
    # (rows, nodes from this many rows on), the first at 1 row; empty: always `max_nodes`
    by_rows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, asked: int | str | None, default: int) -> DraftLength:
        """`default` stands for None, and bounds a bare `auto` when it is larger than
        AUTO_MAX_DRAFT_TOKENS."""
        if asked is None:
            return cls(default)
        word, _, bound = str(asked).partition(":")
        is_auto = word == "auto"
        if bound and word.isdecimal():
            return cls._of_table(str(asked))
        number = (bound or str(max(default, AUTO_MAX_DRAFT_TOKENS))) if is_auto else str(asked)
        if not NUMBER.fullmatch(number.removeprefix("-")) or (
            is_auto and ":" in str(asked) and not bound
        ):
            raise ConfigError(_not_a_length(str(asked)))
        if not 1 <= int(number) <= MAX_DRAFT_TOKENS:
            plain = "; drafter 'none' drafts nothing" if int(number) == 0 else ""
            raise ConfigError(
                f"num_draft_tokens must be between 1 and {MAX_DRAFT_TOKENS}, got {number}{plain}"
            )
        return cls(int(number), is_auto)

    @classmethod
    def _of_table(cls, text: str) -> DraftLength:
        pairs = [part.split(":") for part in text.split(",")]
        if not all(
            len(pair) == 2 and NUMBER.fullmatch(pair[0]) and NUMBER.fullmatch(pair[1])
            for pair in pairs
        ):
            raise ConfigError(_not_a_length(text))
        table = tuple((int(rows), int(nodes)) for rows, nodes in pairs)
        starts = [rows for rows, _ in table]
        max_nodes = max(nodes for _, nodes in table)
        if starts[0] != 1 or starts != sorted(set(starts)):
            raise ConfigError(_not_a_length(text))
        if not 1 <= max_nodes <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"num_draft_tokens must be between 1 and {MAX_DRAFT_TOKENS} at some load, got "
                f"'{text}'"
            )
        return cls(max_nodes, by_rows=table)

    def up_to(self, rows: int) -> DraftLength:
        """The draft length where there are never more rows: of a table what can be reached."""
        reached = tuple(pair for pair in self.by_rows if pair[0] <= rows)
        sizes = {nodes for _, nodes in reached}
        if not any(sizes):
            return self
        return DraftLength(max(sizes), by_rows=reached if len(sizes) > 1 else ())

    @property
    def varies(self) -> bool:
        """Whether steps may ask for different numbers of nodes, none aside."""
        return self.is_auto or len({nodes for _, nodes in self.by_rows if nodes}) > 1

    @property
    def asked(self) -> int | str:
        """The value that `parse` makes of it: a number where it is one."""
        return self.max_nodes if not (self.is_auto or self.by_rows) else str(self)

    def __str__(self) -> str:
        if self.by_rows:
            return ",".join(f"{rows}:{nodes}" for rows, nodes in self.by_rows)
        return f"auto:{self.max_nodes}" if self.is_auto else str(self.max_nodes)


def _not_a_length(text: str) -> str:
    return (
        f"num_draft_tokens must be a number, 'auto' or 'auto:N', got '{text}'; by load it is ROWS:NODES with commas between, "
        "beginning with 1 row, like 1:5,4:3,16:0"
    )
