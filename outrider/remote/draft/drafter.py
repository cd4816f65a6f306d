"""Drafter 'remote': a draft service on another machine, or in another process, drafts while the
target works.

    commit    the tokens of the step go to the service, which drafts after them
    propose   where a draft has arrived that fits the text, the step takes it (a hit); otherwise it waits for the reply
              to its own request as long as `DraftWait` allows, or continues without a draft

No event on the network may change a text or stop a step: replies are checked (`checked_nodes`), a
missing draft makes a plain step, and `connection.py` reconnects. docs/services/draft.md is the
user's side of it.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafters.base import Drafter, DraftSetup
from outrider.drafters.requirements import Requirements
from outrider.remote.draft.chain import (
    DraftChain,
    InvalidReplyError,
    ReceivedNode,
    checked_nodes,
)
from outrider.remote.draft.connection import Connection, DraftReply, ReplyBox, connect, leave
from outrider.remote.draft.drafter_settings import RemoteSettings
from outrider.remote.draft.text import BUSY_S, DraftWait, RemoteText, Rests
from outrider.remote.identity import model_identity
from outrider.remote.protocol import messages
from outrider.rows import PerRow, Row, Rows
from outrider.types import Draft, TargetOutput, Verdict

log = logging.getLogger("outrider.remote")
CONNECT_S = 3.0  # that a start waits for a service
# in a row, after which `commit` asks for nothing more: a control that drafts makes single ones to
# compare
PLAIN_STEPS = 1
NAME = "remote"


class RemoteDrafter(Drafter):
    """Chains from a draft service."""

    needs = "a draft service (--draft-endpoint grpc://HOST:PORT)"
    learns = True  # what is at hand depends on the network
    requires = Requirements(tokenizer=True)  # its hash is compared when the line opens
    repeatable = False
    keeps_costs = False  # so does what a step takes
    Settings = RemoteSettings

    def __init__(
        self,
        connection: Connection,
        settings: RemoteSettings,
        max_nodes: int,
        vocab_size: int,
    ) -> None:
        """`max_nodes`: nodes per row that steps will ask for."""
        self.connection = connection
        self._leave = weakref.finalize(self, leave, connection)
        self._settings = settings
        self._box = ReplyBox()
        self._patience = DraftWait(settings.max_wait_s)
        self._rests = Rests()
        self._texts = PerRow[RemoteText]()  # per row
        self._by_number: dict[int, RemoteText] = {}
        self._usual = max_nodes  # nodes that the latest asking step wanted; 0: drafting rests
        # whether rows without a verifier of their own are; None: not seen yet
        self._coupled: bool | None = None
        self._proposed_s: float | None = None  # when the present step's proposal was made
        self._vocab_size = vocab_size

    @classmethod
    def build(cls, setup: DraftSetup) -> RemoteDrafter:
        settings: RemoteSettings = setup.settings
        endpoint = settings.address
        target = setup.target
        identity = model_identity(target.name, target.tokenizer, target.lm.shape.vocab_size)
        connection = connect(endpoint, settings.access(), identity, CONNECT_S)
        return cls(connection, settings, setup.num_draft_tokens, identity.vocab_size)

    @property
    def notes(self) -> list[str]:
        connection = self.connection
        if connection.is_open:
            probs = "with" if self._with_probs else "without"
            return [
                f"draft service {connection.endpoint}: '{connection.service}', {probs} the "
                "distributions of drawn tokens",
                *connection.notes,
            ]
        trouble = connection.trouble
        if trouble is None:
            return []
        return [
            f"the draft service {connection.endpoint} does not answer ({trouble.reason}: "
            f"{trouble}): decoding continues without it"
        ]

    @property
    def counters(self) -> dict[str, float]:
        return self.connection.counts.as_dict()

    @property
    def summary(self) -> list[str]:
        return [self.connection.counts.summary()]

    def start(self, row: Row) -> None:
        text = RemoteText(
            self.connection.new_row(self._box), DraftChain(len(row.tokens)), self._vocab_size
        )
        self._texts.append(text)
        self._by_number[text.number] = text
        coupled = self._coupled if row.verifier is None else row.verifier.coupled
        if row.params.is_greedy:
            coupled = False
        is_ours = row.drafter in (None, NAME) and not row.prediction
        wanted = min(row.clamp_draft(self._usual), self._max_nodes(row))
        # the service reads the prompt while the target does
        if is_ours and wanted and coupled is not None:
            self._ask([(text, row, wanted, coupled)])

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        began = time.perf_counter()
        coupled = rows.are_coupled
        self._read(self._box.take())
        all_wanted = [
            min(count, self._max_nodes(row)) for count, row in zip(gamma, rows, strict=True)
        ]
        if any(gamma):
            self._usual = max(gamma)
        elif gamma:
            self._usual = 0
        for text, row, wanted, races in zip(self._texts, rows, all_wanted, coupled, strict=True):
            text.want(wanted)
            text.advance(row.tokens)
            if row.verifier is None and not row.params.is_greedy:
                self._coupled = races
        self._ask(
            [
                (text, row, text.wanted, races)
                for text, row, races in zip(self._texts, rows, coupled, strict=True)
                if text.wanted and text.asked != len(row.tokens)
            ]
        )
        lacking = [text for text in self._texts if text.wanted and not text.chain.first(1)]
        waited = self._wait(lacking, began) if lacking else False
        for text in self._texts:
            text.proposed = text.chain.first(text.wanted)
        self._count(lacking, waited=waited)
        draft = draft_of([text.proposed for text in self._texts], rows.vocab_size, rows.device)
        self._proposed_s = time.perf_counter()
        return draft

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        if self._proposed_s is not None:
            self._patience.passes.add(time.perf_counter() - self._proposed_s)
            self._proposed_s = None
        coupled = rows.are_coupled
        self._read(self._box.take())
        asking = []
        for text, row, races in zip(self._texts, rows, coupled, strict=True):
            text.advance(row.tokens)
            wanted = min(
                text.latest_wanted, row.clamp_draft(text.latest_wanted), self._max_nodes(row)
            )
            if wanted > 0 and text.rested <= PLAIN_STEPS and row.finish_reason is None:
                asking.append((text, row, wanted, races))
        self._ask(asking)

    def stop(self, index: int) -> None:
        text = self._texts[index]
        super().stop(index)
        del self._by_number[text.number]
        text.chain.drop()
        self.connection.counts.add(wasted_nodes=text.chain.wasted)
        if text.num_sent is not None and text.epoch == self.connection.epoch:
            self.connection.send([messages.RowRequest(row=text.number, end=True)])
        self.connection.end_row(text.number)

    def close(self) -> None:
        self._leave()

    @property
    def _with_probs(self) -> bool:
        return self._settings.probs == "auto"

    def _max_nodes(self, row: Row) -> int:
        """Nodes that the service may be asked for after this text."""
        terms = self.connection.terms
        if terms is None or (terms.max_context and len(row.tokens) >= terms.max_context):
            return 0
        return terms.max_draft_tokens or self._usual

    def _ask(self, asking: Sequence[tuple[RemoteText, Row, int, bool]]) -> None:
        """Send requests: (text, row, nodes, whether it is coupled)."""
        connection = self.connection
        now = time.perf_counter()
        epoch = connection.epoch
        asking = [request for request in asking if request[0].may_ask(epoch, now)]
        if not asking or not connection.is_open or self._rests.is_resting:
            return
        requests = [
            text.request(row, epoch, wanted, coupled=races, with_probs=self._with_probs)
            for text, row, wanted, races in asking
        ]
        if not connection.send(requests):
            for text, *_ in asking:  # the stream has just broken: on the next one all is sent again
                text.epoch = -1

    def _wait(self, lacking: Sequence[RemoteText], began_s: float) -> bool:
        """Wait for replies to the present requests of these texts; whether there was any waiting."""
        deadline = began_s + self._patience.budget_s
        waited = False
        while True:
            now = time.perf_counter()
            open_texts = [text for text in lacking if self._is_expected(text, now, deadline)]
            if not open_texts:
                break
            waited = True
            self._read(self._box.take(timeout_s=deadline - now))
        if waited:
            self.connection.counts.add(wait_seconds=time.perf_counter() - began_s)
        return waited

    def _is_expected(self, text: RemoteText, now_s: float, deadline_s: float) -> bool:
        asked_s = text.asked_s.get(text.chain.length)
        silent_since_s = text.silent_since_s
        if asked_s is None or silent_since_s is None or text.chain.first(1):
            return False
        if not self.connection.is_open or text.epoch != self.connection.epoch:
            return False
        return self._patience.expects(asked_s, silent_since_s, now_s, deadline_s)

    def _count(self, lacking: Sequence[RemoteText], *, waited: bool) -> None:
        counts = self.connection.counts
        missed = sum(not text.proposed for text in lacking)
        wanted = sum(text.wanted > 0 for text in self._texts)
        if wanted and self.connection.is_open:
            self._rests.observe(had_any=missed < wanted)
        counts.add(hits=wanted - len(lacking), waits=len(lacking) - missed, misses=missed)

    # ---------------------------------------------------------------- replies

    def _read(self, replies: Sequence[DraftReply]) -> None:
        for reply in replies:
            text = self._by_number.get(reply.row.row)
            if text is not None:
                try:
                    self._take(text, reply)
                except InvalidReplyError as error:
                    text.chain.drop()
                    self.connection.report(str(error))

    def _take(self, text: RemoteText, reply: DraftReply) -> None:
        """The drafts of one reply. Raises InvalidReplyError."""
        reply_row = reply.row
        if reply_row.trouble != messages.TROUBLE_NONE:
            self._mend(text, reply_row)
            return
        if reply_row.base_length > text.chain.length:
            raise InvalidReplyError(
                f"nodes after token {reply_row.base_length} of a text of {text.chain.length}"
            )
        if (sent_s := text.answered(reply_row.base_length)) is not None:
            self._patience.replies.add(reply.at_s - sent_s)
            self.connection.counts.add(round_trips=1, round_trip_seconds=reply.at_s - sent_s)
        nodes = checked_nodes(reply_row.nodes, self._vocab_size, with_probs=self._with_probs)
        self.connection.counts.add(nodes=len(nodes))
        text.chain.add(reply_row.base_length, nodes)

    def _mend(self, text: RemoteText, reply_row: messages.RowReply) -> None:
        """A trouble that the service names: tell it what it lacks with the next request, or leave
        it alone."""
        if reply_row.trouble == messages.TROUBLE_UNKNOWN_ROW:
            reason = "unknown_row"
            text.num_sent = None
        elif reply_row.trouble == messages.TROUBLE_MISSING_TOKENS:
            reason = "missing_tokens"
            text.num_sent = min(reply_row.have_length, text.num_sent or 0)
        elif reply_row.trouble == messages.TROUBLE_BUSY:
            reason = "busy"
            text.busy_until_s = time.perf_counter() + BUSY_S
        else:
            reason = "refused"
            text.is_refused = True
            log.info(
                "draft service %s drafts nothing for a text: %r",
                self.connection.endpoint,
                reply_row.reason[:200],
            )
        text.asked = None
        text.asked_s.clear()
        self.connection.counts.trouble(reason)


def draft_of(
    chains: Sequence[Sequence[ReceivedNode]], vocab_size: int, device: torch.device
) -> Draft:
    """Chains of nodes, one a row, as a draft: distributions written out where any node was drawn."""
    width = max(map(len, chains), default=0)
    if not width:
        return Draft.empty(len(chains), device)
    tokens = torch.tensor(
        [[*(node.token for node in chain), *[0] * (width - len(chain))] for chain in chains],
        device=device,
    )
    lengths = torch.tensor([len(chain) for chain in chains], device=device)
    if not any(node.distribution is not None for chain in chains for node in chain):
        return Draft(tokens, lengths)
    probs, drawn = _probs(chains, width, vocab_size)
    return Draft(tokens, lengths, probs=probs.to(device), sampled=drawn.to(device))


def _probs(
    chains: Sequence[Sequence[ReceivedNode]], width: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """(B, N+1, V), a point mass where a node was placed; and (B, N), whether it was drawn."""
    probs = torch.zeros(len(chains), width + 1, vocab_size)
    drawn = torch.zeros(len(chains), width, dtype=torch.bool)
    for row, chain in enumerate(chains):
        for position, node in enumerate(chain):
            if node.distribution is None:
                probs[row, position, node.token] = 1.0
            else:
                probs[row, position, torch.from_numpy(node.distribution.tokens)] = torch.from_numpy(
                    node.distribution.probs
                )
                drawn[row, position] = True
    return probs, drawn
