"""The clients' texts, and the drafts they wait for. Shared by the event loop and the thread that
computes.

    table = HostedTexts(limits, vocab_size, max_context)
    trouble = table.receive(stream, request)     # event loop: commit tokens, note what is wanted; None: all is well
    jobs = table.take(32)                        # computing thread: clients in turn, the newest request of each row

A row's newest request replaces the one that waits, so a slow service does no stale work, and the
number of rows limits what waits. A text's tokens are those of its last message: a lost message is
noticed by its length.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from outrider.errors import ConfigError
from outrider.remote.draft.text import RowOptions, row_options
from outrider.remote.protocol import messages
from outrider.sampling.draft_filters import HEAD
from outrider.settings import checked, setting


@checked()
@dataclass(frozen=True, kw_only=True)
class DraftLimits:
    """Bounds of one service. Raises ConfigError for what cannot be."""

    max_draft_tokens: int = setting(8, "most nodes of a chain", at_least=1, at_most=64)
    batch_size: int = setting(32, "rows of one drafting call", at_least=1)
    max_rows: int = setting(256, "texts of one asker that are kept", at_least=1)
    max_instances: int = setting(64, "askers", at_least=1)
    memory_bytes: int = setting(2 << 30, "for keys and values", at_least=1)
    distribution_tokens: int = setting(
        64, "likeliest tokens that a distribution is cut to", at_least=1, at_most=HEAD
    )


class AskerCall(Protocol):
    """One open call of an asker. `send` may be called from any thread."""

    def send(self, replies: list[messages.RowReply]) -> None: ...


@dataclass(eq=False)
class HostedText:
    """One row of one asker."""

    uid: int  # unique in this process: a row that begins anew is another text
    stream: AskerCall
    number: int  # the asker's
    options: RowOptions
    width: int  # of the asker's vocabulary
    tokens: list[int] = field(default_factory=list)
    asked: int = 0  # the number of its latest request, of all requests
    changed: int = 0  # tokens before this index are known to the computing thread
    wanted: int = 0  # nodes that the asker waits for


@dataclass(frozen=True)
class Job:
    """A draft to be made, and how the row's text has changed since its last job."""

    text: HostedText
    asked: int  # the number of the request
    num_nodes: int
    start: int  # the text is its first `start` tokens, then `tail`
    tail: list[int]


class TroubleError(Exception):
    """A message that leads to no draft. `have`: tokens of the text that are known."""

    def __init__(self, kind: messages.Trouble, reason: str, have: int = 0) -> None:
        super().__init__(reason)
        self.kind = kind
        self.have = have


@dataclass
class _Asker:
    """One call."""

    waiting: dict[int, HostedText] = field(default_factory=dict)  # by uid, in the order of asking
    rows: dict[int, HostedText] = field(default_factory=dict)  # by the asker's number


class HostedTexts:
    """The texts that a draft service holds for its callers."""

    def __init__(
        self,
        limits: DraftLimits,
        vocab_size: int,
        max_context: int,
    ) -> None:
        self._limits = limits
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._news = threading.Condition()
        self._askers: dict[AskerCall, _Asker] = {}
        self._uids = count()
        self._requests = count(1)
        self._gone: list[int] = []
        self._num_taken = 0  # jobs of the latest `take`: the thread is at them until the next one
        self._turn: list[AskerCall] = []  # askers, who comes first in the next batch

    # ---------------------------------------------------------------- the event loop's side

    def connect(self, stream: AskerCall) -> None:
        """A stream begins."""
        with self._news:
            self._askers[stream] = _Asker()
            self._turn.append(stream)

    def disconnect(self, stream: AskerCall) -> None:
        """A stream has ended, and its texts with it."""
        with self._news:
            asker = self._askers.pop(stream)
            self._turn.remove(stream)
            for number in list(asker.rows):
                self._remove(asker, number)

    def receive(self, stream: AskerCall, request: messages.RowRequest) -> messages.RowReply | None:
        """Take in one message about a row. What is wrong with it, to be answered at once; None:
        nothing."""
        with self._news:
            asker = self._askers[stream]
            if request.end:
                self._remove(asker, request.row)
                return None
            try:
                text = self._commit(asker, stream, request)
            except TroubleError as error:
                if error.kind == messages.TROUBLE_REFUSED:
                    self._remove(asker, request.row)
                return messages.RowReply(
                    row=request.row,
                    base_length=request.base_length,
                    have_length=error.have,
                    trouble=error.kind,
                    reason=str(error),
                )
            text.asked = next(self._requests)
            text.wanted = min(request.num_draft_tokens, self._limits.max_draft_tokens)
            if text.wanted:
                asker.waiting[text.uid] = text
                self._news.notify()
            else:
                asker.waiting.pop(text.uid, None)
            return None

    def _commit(self, asker: _Asker, stream: AskerCall, request: messages.RowRequest) -> HostedText:
        """The row's text with the message's tokens. Raises TroubleError."""
        base = request.base_length
        tokens = list(request.tokens)
        text = asker.rows.get(request.row)
        if request.HasField("sampling"):
            text = self._new_text(asker, stream, request)
        elif text is None:
            raise TroubleError(messages.TROUBLE_UNKNOWN_ROW, "never seen, or forgotten since")
        elif base > len(text.tokens):
            have = len(text.tokens)
            raise TroubleError(messages.TROUBLE_MISSING_TOKENS, "a message was lost", have)
        if base + len(tokens) == 0:
            raise TroubleError(
                messages.TROUBLE_REFUSED, "a text without a token: nothing can be drafted after it"
            )
        if base + len(tokens) > self._max_context:
            raise TroubleError(
                messages.TROUBLE_REFUSED,
                f"{base + len(tokens)} tokens, and the drafter has room for {self._max_context}",
            )
        if tokens and max(tokens) >= text.width:
            raise TroubleError(
                messages.TROUBLE_REFUSED,
                f"token {max(tokens)} is outside the vocabulary of {text.width}",
            )
        same = common(text.tokens, base, tokens)
        text.tokens[base:] = tokens
        text.changed = min(text.changed, base + same)
        return text

    def _new_text(
        self, asker: _Asker, stream: AskerCall, request: messages.RowRequest
    ) -> HostedText:
        """A row that begins, or begins anew."""
        if request.base_length:
            raise TroubleError(messages.TROUBLE_MISSING_TOKENS, "a row begins with all its tokens")
        if request.row not in asker.rows and len(asker.rows) >= self._limits.max_rows:
            raise TroubleError(
                messages.TROUBLE_BUSY, f"{self._limits.max_rows} rows are open (--limits max_rows)"
            )
        try:
            options = row_options(
                request.sampling, self._vocab_size, self._limits.distribution_tokens
            )
        except ConfigError as error:
            raise TroubleError(messages.TROUBLE_REFUSED, str(error)) from error
        self._remove(asker, request.row)
        width = request.sampling.vocab_size or self._vocab_size
        text = HostedText(next(self._uids), stream, request.row, options, width)
        asker.rows[request.row] = text
        return text

    # ---------------------------------------------------------------- the computing thread's side

    def take(self, max_jobs: int) -> list[Job]:
        """At most this many drafts to be made: a row of each asker in turn, until there are no more."""
        with self._news:
            jobs: list[Job] = []
            turn = [stream for stream in self._turn if self._askers[stream].waiting]
            if turn:  # the first one this time is the last one next time
                self._turn.remove(turn[0])
                self._turn.append(turn[0])
            while turn and len(jobs) < max_jobs:
                stream = turn.pop(0)
                waiting = self._askers[stream].waiting
                jobs.append(self._job(waiting.pop(next(iter(waiting)))))
                if waiting:
                    turn.append(stream)
            self._num_taken = len(jobs)
            return jobs

    @staticmethod
    def _job(text: HostedText) -> Job:
        start = text.changed
        text.changed = len(text.tokens)
        return Job(text, text.asked, text.wanted, start, text.tokens[start:])

    def put_back(self, job: Job) -> None:
        """The draft could not be made yet. It waits again, unless something newer does."""
        with self._news:
            text = job.text
            if self._is_kept(text) and text.asked == job.asked and text.wanted:
                self._askers[text.stream].waiting.setdefault(text.uid, text)

    def fits(self, job: Job, base: int) -> bool:
        """Whether a draft after the row's first `base` tokens is still of use, although newer
        requests may have come: its asker listens, and those tokens are what they were when the job
        was taken."""
        with self._news:
            text = job.text
            return self._is_kept(text) and text.changed >= base and text.wanted > 0

    def _is_kept(self, text: HostedText) -> bool:
        asker = self._askers.get(text.stream)
        return asker is not None and asker.rows.get(text.number) is text

    def wait(self, timeout_s: float) -> None:
        """Return when a draft is wanted, or after this many seconds."""
        with self._news:
            if not any(asker.waiting for asker in self._askers.values()) and not self._gone:
                self._news.wait(timeout_s)

    def wake(self) -> None:
        """End a `wait`."""
        with self._news:
            self._news.notify_all()

    def num_waiting(self) -> int:
        """Drafts that are wanted and not taken yet."""
        with self._news:
            return sum(len(asker.waiting) for asker in self._askers.values())

    def num_unanswered(self) -> int:
        """Drafts that are wanted, or in the works."""
        with self._news:
            return self._num_taken + sum(len(asker.waiting) for asker in self._askers.values())

    def num_rows(self) -> int:
        """Texts that are kept."""
        with self._news:
            return sum(len(asker.rows) for asker in self._askers.values())

    def gone(self) -> list[int]:
        """Texts (uids) that ended since the last call."""
        with self._news:
            gone = self._gone
            self._gone = []
            return gone

    def remove(self, text: HostedText) -> None:
        """Forget a text: its row is unknown from now on, unless it was started again."""
        with self._news:
            if self._is_kept(text):
                self._remove(self._askers[text.stream], text.number)

    def least_recent(self, uids: Iterable[int], but: Collection[int]) -> HostedText | None:
        """The text among `uids` that nobody has asked about for longest, without those in `but`."""
        with self._news:
            chosen = set(uids) - set(but)
            texts = [
                text
                for asker in self._askers.values()
                for text in asker.rows.values()
                if text.uid in chosen
            ]
            return min(texts, key=lambda text: text.asked, default=None)

    def _remove(self, asker: _Asker, number: int) -> None:
        text = asker.rows.pop(number, None)
        if text is not None:
            asker.waiting.pop(text.uid, None)
            self._gone.append(text.uid)


def common(text: list[int], start: int, tokens: list[int]) -> int:
    """How many of `tokens` the text has from `start` on."""
    if text[start : start + len(tokens)] == tokens:
        return len(tokens)
    pairs = zip(text[start : start + len(tokens)], tokens, strict=False)
    return next(
        (index for index, (ours, theirs) in enumerate(pairs) if ours != theirs),
        min(len(text) - start, len(tokens)),
    )
