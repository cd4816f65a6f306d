"""One row's grammar, walked along draft paths: advance, read the mask, go back.

Nodes of a draft come parents first, so consecutive paths share a beginning: the matcher goes back
to what two paths have in common and on from there. A chain is walked once. Masks are remembered
until the next commit, for the drafter that asked on its way and the target that asks again for the
whole draft.

A matcher may break on the way (compiled.py): then the row starts a new matcher, reads the committed
text, and asks once more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider.errors import NumericalError, RequestError
from outrider.grammar.compiled import Compiled
from outrider.grammar.limits import REBUILD_S
from outrider.grammar.specs import Spec

Given = TypeVar("Given")
Found = TypeVar("Found")


class Matcher:
    """A `Constraint` (outrider/sampling/constraint.py) around llguidance's LLMatcher. For one row,
    in one thread.

    All calls raise RequestError when the grammar takes more work than llguidance allows; so do all
    that follow."""

    def __init__(
        self,
        grammar: Compiled,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        spec: Spec | None = None,
    ) -> None:
        """`grammar`: over the tokens 0 .. vocab_size - 1; `spec`: what it was made from."""
        self.spec = spec
        self._grammar = grammar
        self._matcher: Any = grammar.copy()
        self._eos = eos_token_ids
        # after an end, or a mistake: whatever
        self._free = torch.ones(vocab_size, dtype=torch.bool)
        self._ended = False  # the end token was emitted
        self._emitted: list[int] = []  # committed tokens but the end
        self._walked: list[int] = []  # tokens the matcher has consumed beyond the committed ones
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._failure: RequestError | None = None
        self._rebuilding_s = 0.0  # of a processor

    @property
    def is_over(self) -> bool:
        return self._ended or bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def allowed(self, paths: Sequence[Sequence[int]]) -> Tensor:
        masks = [self._mask(tuple(path)) for path in paths]
        self._go_back(0)
        return torch.stack(masks)

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """Tokens that are forced as far as the masks tell.

        Where all allowed tokens begin the longest one of them, as `a`, `ab` and `abc` do, the text is
        taken to go along that one.

        llguidance can compute the forced text, but in a time that grows with its square: that of one
        constant of half a megabyte takes a minute.
        """
        text = b""
        along = tuple(path)
        with contextlib.suppress(NumericalError):  # what is forced leads to a dead end
            while not self._ended and len(along) < len(path) + most:
                token = self._grammar.only_way(self._mask(along))
                if token is None:
                    break
                text += self._grammar.bytes_of(token)
                along = (*along, token)
        self._go_back(0)
        return self._grammar.spelled(text) if text else []

    def commit(self, tokens: Sequence[int]) -> None:
        """Commit tokens. Raises NumericalError when a token breaks the grammar, because it was
        chosen without the mask."""
        for token in tokens:
            if self._ended:
                return
            if token in self._eos:
                self._ended = True
            elif self._unbroken(self._consumes, token):
                self._emitted.append(token)
            else:
                raise NumericalError(
                    f"token {token} was emitted, which the grammar does not allow here"
                )
        self._known.clear()

    def _mask(self, path: tuple[int, ...]) -> Tensor:
        if path not in self._known:
            self._known[path] = self._free if self._ended else self._unbroken(self._behind, path)
        return self._known[path]

    def _behind(self, path: tuple[int, ...]) -> Tensor:
        """(V,) bool: what may follow. Means nothing when the matcher broke."""
        return self._read() if self._walk(path) else self._free

    def _walk(self, path: tuple[int, ...]) -> bool:
        """Stand at the end of `path`; False where the grammar has no such path, or ended on it."""
        shared = 0
        while shared < min(len(path), len(self._walked)) and path[shared] == self._walked[shared]:
            shared += 1
        self._go_back(shared)
        for at in range(shared, len(path)):
            token = path[at]
            mask = self._known.get(path[:at])
            is_refused = mask is not None and not mask[token]
            if is_refused or token in self._eos or not self._consumes(token):
                return False
            self._walked.append(token)
        return True

    def _go_back(self, length: int) -> None:
        """Undo all but the first `length` tokens of the walk."""
        if len(self._walked) > length:
            self._matcher.rollback(len(self._walked) - length)
            del self._walked[length:]

    def _read(self) -> Tensor:
        mask = np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8) != 0
        if not mask.any() and not self._matcher.is_error():
            raise NumericalError("the grammar leaves no token to continue with")
        return torch.from_numpy(mask)

    def _consumes(self, token: int) -> bool:
        if self._matcher.try_consume_tokens([token]) == 1:
            return True
        # a lexer that was used up within the token may say so at the next mask only
        self._matcher.compute_logit_bias()
        return False

    def _unbroken(self, ask: Callable[[Given], Found], given: Given) -> Found:
        """The answer of `ask`, from a matcher that does not break meanwhile."""
        if self._failure is None:
            answer = ask(given)
            if not self._matcher.is_error():
                return answer
            if self._grammar.is_lexer_used_up(self._matcher):
                if self._rebuilding_s + self._grammar.seconds > REBUILD_S:
                    self._failure = self._grammar.refusal_of(
                        f"its lexer was used up again and again, for {REBUILD_S:g} s"
                    )
                    raise self._failure
                self._begin_anew()
                answer = ask(given)
                if not self._matcher.is_error():
                    return answer
            self._failure = self._grammar.refusal(self._matcher)
        raise self._failure

    def _begin_anew(self) -> None:
        """Stand at the end of the committed text with a new matcher, which may be broken again.

        This happens in the engine's thread, where other rows wait for it."""
        began = time.thread_time()
        self._matcher = self._grammar.anew()
        self._walked = []
        for token in self._emitted:  # one by one: a lexer's fuel is that of a call
            if not self._consumes(token):
                break
        self._rebuilding_s += time.thread_time() - began
