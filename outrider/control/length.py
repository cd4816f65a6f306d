"""`--num-draft-tokens`: a number fixes the draft length, `auto` frees it, `auto:12` frees it up to 12."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ConfigError

MAX_DRAFT_TOKENS = 64
AUTO_MAX_DRAFT_TOKENS = 8


@dataclass(frozen=True)
class DraftLength:
    """The most nodes a row may get in a step, and whether fewer may be chosen."""

    most: int
    is_auto: bool = False

    @classmethod
    def parse(cls, asked: int | str | None, default: int) -> DraftLength:
        """`default` stands for None, and bounds a bare `auto` when it is larger than AUTO_MAX_DRAFT_TOKENS."""
        if asked is None:
            return cls(default)
        word, _, bound = str(asked).partition(":")
        is_auto = word == "auto"
        number = (bound or str(max(default, AUTO_MAX_DRAFT_TOKENS))) if is_auto else str(asked)
        if not number.lstrip("-").isdigit() or (is_auto and ":" in str(asked) and not bound):
            raise ConfigError(f"num_draft_tokens must be a number, 'auto' or 'auto:N', got '{asked}'")
        if not 1 <= int(number) <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"num_draft_tokens must be between 1 and {MAX_DRAFT_TOKENS}, got {number}")
        return cls(int(number), is_auto)

    def __str__(self) -> str:
        return f"auto:{self.most}" if self.is_auto else str(self.most)
