"""One target as the coordinator knows it: an `outrider serve`, watched, and given up when it is
silent or lies.

    away -> ready <-> draining       refused: reachable, and not to be mixed with the others
      ^       |
      +-------+ silent, hung, dead, lying, unreachable
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import httpx2

from outrider.errors import ServerError
from outrider.remote.access import TOKEN_VARIABLE, Access
from outrider.remote.coordinator.identity import Facts, facts_of
from outrider.remote.coordinator.settings import CoordinatorSettings
from outrider.wellformed import parsed_json

log = logging.getLogger("outrider.service")
Standing = Literal["away", "refused", "ready", "draining"]
# between two tries to reach a target
SHORTEST_BREAK_S = 0.2
LONGEST_BREAK_S = 5.0
REFUSED_BREAK_S = 10.0  # before a target that was refused, or lied, is asked again
PROBE_S = 120.0  # for one request of a probe, in a queue of others
MAX_PAGE = 4 << 20  # bytes of an answer to a probe
DRAINING = "shutting_down"  # the code of `outrider serve` that drains


class RefusedError(Exception):
    """A target must not answer alongside the others."""


class AwayError(Exception):
    """A target cannot be used at present."""


@dataclass(eq=False)
class Call:
    """One running request, as the target's watcher sees it."""

    limit: asyncio.Timeout
    last_s: float  # when it brought something last, on the monotonic clock

    def heard(self) -> None:
        """Note that it brought something."""
        self.last_s = time.monotonic()


class Target:
    """Lives in the coordinator's event loop."""

    def __init__(
        self,
        address: str,
        settings: CoordinatorSettings,
        client: httpx2.AsyncClient,
        admit: Callable[[Target], None],
        changed: Callable[[], None],
    ) -> None:
        """`admit` raises RefusedError for a target that may not answer here; `changed` is called
        with every new standing."""
        self.name = address
        self.standing: Standing = "away"
        self.reason = "not reached yet"
        self.models: dict[str, Facts] = {}
        # what requests may call its models, routes included
        self.names: frozenset[str] = frozenset()
        self.in_flight = 0
        self.failures: Counter[str] = Counter()  # kind of trouble -> how often
        self._settings = settings
        self._client = client
        self._admit = admit
        self._changed = changed
        self._cards: list[dict[str, Any]] | None = None  # when it was probed
        self._calls: set[Call] = set()
        self._pause_s = SHORTEST_BREAK_S
        self._logged = ""  # the trouble that the log has

    @property
    def is_usable(self) -> bool:
        """Whether it takes new requests."""
        return self.standing == "ready"

    def facts_of(self, model: str | None) -> Any:
        """The identity of its answers to requests for `model`; None, and a name of its routes: for
        any of its models."""
        return self.models.get(model or "", self.models)

    def report(self) -> dict[str, Any]:
        """For /health."""
        about: dict[str, Any] = {
            "endpoint": self.name,
            "standing": self.standing,
            "in_flight": self.in_flight,
        }
        if self.reason:
            about["reason"] = self.reason
        return {**about, "models": sorted(self.names)}

    # ---------------------------------------------------------------- watching

    async def keep(self) -> None:
        """Ask how it is, again and again, until cancelled."""
        while True:
            try:
                await self._look()
            except RefusedError as error:
                self._cards = None
                self._stand("refused", str(error), REFUSED_BREAK_S)
            except (AwayError, TimeoutError) as error:
                self._stand("away", str(error) or f"sent nothing for {self._settings.stall_s:g} s")
            except httpx2.HTTPError as error:
                self._stand("away", in_words(error))
            except Exception:
                log.exception("target %s is not understood", self.name)
                self._stand("away", "it is not understood; the log says more", REFUSED_BREAK_S)
            self._cut_silent_calls()
            await asyncio.sleep(
                min(1.0, self._settings.stall_s / 4) if self.is_usable else self._pause_s
            )

    async def _look(self) -> None:
        status, answer = await self._get("/ready")
        sent: Any = answer.get("error")
        error: dict[str, Any] = sent if isinstance(sent, dict) else {}
        if status == 503 and error.get("code") == DRAINING:
            self._stand("draining", "")
            return
        if status != 200:
            raise AwayError(f"answers with {status}: {str(error.get('message'))[:200]}")
        status, answer = await self._get("/v1/models")
        if status == 401:
            raise RefusedError(f"it wants another API key: set {TOKEN_VARIABLE} to one of its keys")
        cards = answer.get("data")
        if (
            status != 200
            or not isinstance(cards, list)
            or not all(_is_card(card) for card in cards)
        ):
            raise RefusedError("its /v1/models is not that of 'outrider serve'")
        if cards != self._cards:
            self.standing = "away"
            self.reason = "being compared with the others"
            self.models = {
                card["id"]: await facts_of(card, self._post)
                for card in cards
                if card.get("max_model_len")
            }
            self.names = frozenset(card["id"] for card in cards)
            self._cards = cards
        self._admit(self)
        self._pause_s = SHORTEST_BREAK_S
        self._stand("ready", "")

    async def _get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with asyncio.timeout(self._settings.stall_s):
            return await self._page("GET", path)

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with asyncio.timeout(PROBE_S):
            status, answer = await self._page("POST", path, json.dumps(body).encode())
        if status == 429 or status >= 500:
            raise AwayError(f"answers a first request with {status}")
        return status, answer

    async def _page(self, method: str, path: str, body: bytes = b"") -> tuple[int, dict[str, Any]]:
        token = self._settings.access.token
        headers = {"authorization": f"Bearer {token}"} if token is not None else {}
        async with self.request(
            method, path, {**headers, "content-type": "application/json"}, body
        ) as response:
            content = await whole(response, MAX_PAGE)
        try:
            answer = parsed_json(content.decode())
        except ValueError as error:
            raise RefusedError(f"its {path} is not JSON") from error
        if not isinstance(answer, dict):
            raise RefusedError(f"its {path} is no JSON object")
        return response.status_code, answer

    def give_up(self, reason: str, *, lies: bool) -> None:
        """Stop using the target, which lost a request, until it is reached again."""
        if lies:
            self._cards = None
        if self.standing != "away" or lies:
            self._stand("away", reason, REFUSED_BREAK_S if lies else None)

    def is_leaving(self) -> None:
        """Note that it refused a request because it drains."""
        self._stand("draining", "")

    def _stand(self, standing: Standing, reason: str, pause_s: float | None = None) -> None:
        if standing in ("away", "refused"):
            self._pause_s = (
                pause_s if pause_s is not None else min(LONGEST_BREAK_S, 2 * self._pause_s)
            )
        if (self.standing, self.reason) == (standing, reason):
            return
        self.standing = standing
        self.reason = reason
        trouble = f"{standing} {reason}"
        if trouble != self._logged:
            self._logged = trouble
            level = logging.INFO if standing in ("ready", "draining") else logging.WARNING
            log.log(
                level, "target %s is %s%s", self.name, standing, f": {reason}" if reason else ""
            )
        self._changed()

    # ---------------------------------------------------------------- requests

    @asynccontextmanager
    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[httpx2.Response]:
        """The answer to one request, its body not yet read."""
        sent = {"accept-encoding": "identity", **headers}
        url = f"{self.name}{path}"
        extensions = named(self._settings.access)
        async with self._client.stream(
            method, url, headers=sent, content=body, extensions=extensions
        ) as response:
            yield response

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[Call]:
        """A running request: raises TimeoutError when the target is away and brings nothing."""
        async with asyncio.timeout(None) as limit:
            call = Call(limit, time.monotonic())
            self._calls.add(call)
            self.in_flight += 1
            try:
                yield call
            finally:
                self.in_flight -= 1
                self._calls.discard(call)

    def _cut_silent_calls(self) -> None:
        """End calls that brought nothing for long on a target that is away: nobody else would
        notice."""
        if self.standing != "away":
            return
        limit = time.monotonic() - self._settings.stall_s
        for call in [call for call in self._calls if call.last_s < limit]:
            call.limit.reschedule(asyncio.get_running_loop().time())
            self._calls.discard(call)


def named(access: Access) -> dict[str, Any]:
    """How a request says which name the server's certificate has."""
    return {} if access.server_name is None else {"sni_hostname": access.server_name}


def ready_s(address: str, access: Access, timeout_s: float) -> float:
    """Seconds there and back, where a server takes requests. Raises ServerError where it does not."""
    try:
        with httpx2.Client(verify=access.context(), timeout=timeout_s, trust_env=False) as client:
            client.get(f"{address}/health", extensions=named(access))  # connects
            began = time.perf_counter()
            response = client.get(f"{address}/ready", extensions=named(access))
            seconds = time.perf_counter() - began
    except httpx2.HTTPError as error:
        raise ServerError(f"{address} does not answer: {in_words(error)}") from error
    if response.status_code != 200:
        raise ServerError(
            f"{address} takes no requests now: {' '.join(response.text.split())[:300]}"
        )
    return seconds


def in_words(error: httpx2.HTTPError) -> str:
    """Why a target was not reached, in one line."""
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "its certificate is of no authority that is trusted here (--tls-ca), or for another name"
    if "certificate required" in text.lower() or "unknown ca" in text.lower():
        return "it wants a certificate of an authority that it trusts (mutual TLS): --tls-cert and --tls-key"
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
        return "no TLS is spoken there: write http://"
    if isinstance(error, httpx2.RemoteProtocolError) and "without sending a response" in text:
        # TLS 1.3 tells of a refused certificate after the handshake: its alert may be lost
        return (
            "it closed the line without an answer: it was stopped, or wants TLS (https://), or a "
            "certificate of an authority that it trusts (--tls-cert)"
        )
    if isinstance(error, httpx2.TimeoutException):
        return "it does not answer"
    if isinstance(error, httpx2.ConnectError):
        return (
            "nobody listens there" if "attempts failed" in text or "refused" in text else text[:200]
        )
    return text[:200] or type(error).__name__


async def whole(response: httpx2.Response, limit: int) -> bytes:
    """A body in one piece. Raises AwayError for one that is longer than `limit`."""
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        if len(content) > limit:
            raise AwayError(f"sends more than {limit} bytes at once")
    return bytes(content)


def _is_card(card: Any) -> bool:
    return isinstance(card, dict) and isinstance(card.get("id"), str)
