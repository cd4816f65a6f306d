"""The replicas of one model: which may replace one another, and which takes the next request.

A request that loses its replica continues at another one with the same text, so all replicas in use must have the same tokenizer,
weights and arithmetic. The first one that is reached defines them, until no such replica was seen for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import CapabilityError, UnavailableError
from outrider.remote.coordinator.choice import choose
from outrider.remote.coordinator.replica import Replica, Timeouts
from outrider.remote.endpoint import Endpoint
from outrider.remote.identity import check_model, check_protocol, check_tokenizer
from outrider.remote.protocol import PROTOCOL, messages
from outrider.remote.security import ClientSecurity
from outrider.version import __version__


@dataclass(frozen=True, kw_only=True)
class ReplicaNeeds:
    """What a replica must have to take a request."""

    length: int  # tokens, prompt and longest answer
    drafter: str | None = None
    lossy: str | None = None
    model_sha256: str | None = None  # of the replica that began the answer

    def why_not(self, replica: Replica) -> str | None:
        """The reason why a replica cannot take the request; None: it can."""
        terms, identity = replica.terms, replica.identity
        if terms is None or identity is None:
            return "it was never reached"
        if self.length > terms.max_context:
            return f"its context holds {terms.max_context} tokens, not {self.length}"
        if self.drafter is not None and self.drafter not in (*terms.drafters, "prediction"):
            return f"it has no drafter '{self.drafter}'"
        if self.lossy is not None and self.lossy not in terms.lossy_verifiers:
            return f"it does not allow the lossy verifier '{self.lossy}'"
        if self.model_sha256 not in (None, identity.model_sha256):
            return "it has other weights or arithmetic than the replica that began the answer"
        return None


class Fleet:
    """The replicas that a coordinator knows, and which of them may be used.

    Lives in the coordinator's event loop; properties may be read anywhere.
    """

    def __init__(
        self, name: str, endpoints: Sequence[Endpoint], security: ClientSecurity, identity: messages.ModelIdentity,
        patience: Timeouts, *, instance: str, hold_s: float,
    ) -> None:  # fmt: skip
        """`identity`: of the tokenizer here; `hold_s`: how long the measure outlives the last replica that met it."""
        self.name = name
        self._identity, self._hold_s = identity, hold_s
        self._measure: messages.ModelIdentity | None = None
        self._measured_s = 0.0  # when a replica that meets it was last in use
        self._was_met = False  # whether some replica was in use when the fleet last changed
        self._changed = asyncio.Event()
        self.known: messages.TargetTerms | None = None  # of the first replica that was admitted
        hello = messages.Hello(protocol=PROTOCOL, release=__version__, instance=instance, model=identity)
        self.replicas = [Replica(one, security, hello, patience, self._admit, self._notify) for one in endpoints]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to reach replicas."""
        self._tasks = [asyncio.ensure_future(replica.keep()) for replica in self.replicas]

    async def close(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    @property
    def usable(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.is_usable]

    @property
    def vocab_size(self) -> int:
        """Width of the logits. Some replica must have been admitted."""
        assert self._measure is not None
        return self._measure.vocab_size

    @property
    def context(self) -> int:
        """Tokens that a request may hold at every replica that was admitted."""
        return min(one.terms.max_context for one in self.replicas if one.terms is not None)

    def reasons(self) -> str:
        """Why nobody answers, in a line."""
        return "; ".join(f"{one.name} is {one.standing}{f' ({one.reason})' if one.reason else ''}" for one in self.replicas)

    async def choose(self, beginning: bytes, needs: ReplicaNeeds, full: Collection[Replica], until_s: float) -> Replica | None:
        """The replica that takes a request, counted as in flight there. None: only `full` ones could.

        Raises CapabilityError when those that answer cannot, UnavailableError when nobody answers until `until_s` (monotonic).
        """
        while True:
            able = [replica for replica in self.usable if needs.why_not(replica) is None]
            free = {replica.name: replica for replica in able if replica not in full}
            if free:
                chosen = free[choose(beginning, {name: one.load for name, one in free.items()})]
                chosen.in_flight += 1
                return chosen
            if able:
                return None
            if self.usable and needs.model_sha256 is None:
                raise CapabilityError("; ".join(f"{one.name}: {needs.why_not(one)}" for one in self.usable))
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise UnavailableError(f"no replica of '{self.name}' answers: {self.reasons()}")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, 1.0)):
                    await self._changed.wait()

    def snapshot(self) -> dict[str, int]:
        """Sums over replicas that were reached."""
        states = [one.state for one in self.replicas if one.standing in ("ready", "draining")]
        return {name: sum(getattr(state, name) for state in states) for name in ("kv_tokens", "kv_capacity")}

    def report(self) -> list[dict[str, Any]]:
        """For /health."""
        return [replica.report() for replica in self.replicas]

    def _admit(self, replica: Replica, welcome: messages.Welcome) -> None:
        """Raises CapabilityError for a replica that must not be mixed with the others, or is none."""
        who = f"the target service {replica.name}"
        check_protocol(welcome, who)
        if not welcome.HasField("target"):
            raise CapabilityError(f"{who} is no target service: 'outrider service target' is one")
        check_tokenizer(self._identity, welcome.model, who)
        others = [one for one in self.replicas if one is not replica and one.standing in ("ready", "draining")]
        now = time.monotonic()
        is_free = not others and now - self._measured_s > self._hold_s
        is_measure = self._measure is None or (is_free and replica.in_flight == 0)
        check_model(welcome.model if is_measure or self._measure is None else self._measure, welcome.model, who)
        self._measure, self._measured_s = welcome.model, now
        self.known = self.known or welcome.target

    def _notify(self) -> None:
        is_met = any(one.standing in ("ready", "draining") for one in self.replicas)
        if is_met or self._was_met:
            self._measured_s = time.monotonic()
        self._was_met = is_met
        self._changed.set()
