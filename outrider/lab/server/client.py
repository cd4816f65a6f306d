"""One OpenAI-compatible server: its address and key, the body of a request, and the stream that
answers it.

A key comes from an environment variable, goes into one header, and is cut out of every message that
a server sends back. Only what was asked for is sent: a parameter at its default is the server's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx2

from outrider.errors import ConfigError, OutriderError, RequestError, ServerError
from outrider.lab.bench.bench_result import MeasuredAnswer
from outrider.lab.server.logprobs import TokenLogprob, logprobs_of
from outrider.lab.workload.types import WorkloadRequest
from outrider.sampling.params import SamplingParams
from outrider.wellformed import parsed_json

CONNECT_S = 10.0
ALWAYS = ("temperature", "max_tokens")  # sent whatever their value
# statuses of 4xx that say nothing against the request itself
NOT_THE_REQUEST = (401, 403, 408, 429)
HINTS = {
    401: "name the environment variable that holds the API key: --server api_key_env=NAME",
    404: "is it an OpenAI-compatible server, and does it serve this model?",
    429: "measure at a lower concurrency",
}
END = "[DONE]"
MAX_CHARACTERS = 1 << 24  # of one answer; no prompt of a measurement asks for as many
MAX_MESSAGE = 1 << 16  # bytes that are read of what is no stream
# reasons that vLLM and SGLang end a request with that they could not finish
GIVEN_UP = ("abort", "error")


@dataclass(frozen=True)
class ServerEndpoint:
    """`root`: the URL up to and without /v1, where /metrics lies."""

    url: str  # as the user wrote it
    root: str
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None  # None: the only one it serves

    @classmethod
    def parse(
        cls, url: str, *, api_key: str | None = None, model: str | None = None
    ) -> ServerEndpoint:
        """From `http://host:port`, with or without /v1 and what follows it. Raises ConfigError."""
        try:
            parts = urlsplit(url.strip())
            path = (parts.path.rstrip("/") + "/").rsplit("/v1/", 1)[0].rstrip("/")
            root = f"{parts.scheme}://{parts.netloc}{path}"
            is_server = (
                bool(httpx2.URL(root).host)
                and parts.scheme in ("http", "https")
                and parts.port != 0
            )
        except (ValueError, httpx2.InvalidURL) as error:
            raise ConfigError(f"'{url}' is no URL: {error}") from error
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigError(
                "a server's URL holds no password and no query: results would record it; keys "
                "come by environment"
            )
        if not is_server:
            raise ConfigError(
                f"a server is given as http://HOST:PORT or https://HOST/PATH; got '{url}'"
            )
        return cls(url.strip(), root, api_key, model)


def key_from(variable: str | None) -> str | None:
    """The API key in an environment variable; None where none is named. Raises ConfigError when it
    is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"the environment variable {variable}, which should hold the API key, is not set or "
            "empty"
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the API key in {variable} has characters that no HTTP header can carry")
    return key


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """How prompts are put to a server. Raises ConfigError for what cannot be done."""

    concurrency: int = 1  # requests in flight: a new one begins as soon as one ends
    sampling: SamplingParams = field(default_factory=SamplingParams)
    # auto: conversations to chat, prompts to completions
    api: Literal["auto", "chat", "completions"] = "auto"
    timeout_s: float = 300.0  # without a sign of life
    settle_s: float = 0.25  # between two readings of the counters, until they stand still

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.timeout_s <= 0:
            raise ConfigError(
                f"a concurrency is 1 or more and a timeout more than 0 s; got {self.concurrency} "
                f"and {self.timeout_s:g}"
            )

    def body(self, request: WorkloadRequest, model: str) -> tuple[str, dict[str, Any]]:
        """(path, JSON body) of a request. Raises ConfigError for a conversation that must go to
        /completions."""
        defaults = SamplingParams()
        asked = {
            setting.name: getattr(self.sampling, setting.name) for setting in fields(SamplingParams)
        }
        body = {
            name: value
            for name, value in asked.items()
            if name in ALWAYS or value != getattr(defaults, name)
        }
        if request.max_tokens is not None:
            body["max_tokens"] = self.sampling.limit(request.max_tokens)
        body |= {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        if self.api == "chat" or (self.api == "auto" and request.messages is not None):
            messages = request.messages or ({"role": "user", "content": request.prompt or ""},)
            return "/v1/chat/completions", body | {"messages": list(messages)}
        if request.messages is not None:
            raise ConfigError(
                f"request '{request.id}' is a conversation, and only the server knows its chat "
                "template: use the API chat or auto"
            )
        return "/v1/completions", body | {"prompt": request.prompt}


class Client:
    """One server's connections. Proxies of the environment are not asked: they would be measured
    too.

    `reuse`: a connection takes several requests. Where time does not matter each has its own:
    llama.cpp's server at times closes one just when the next request comes, which is then lost.
    """

    def __init__(self, endpoint: ServerEndpoint, *, timeout_s: float, reuse: bool = True) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self.http = httpx2.AsyncClient(
            timeout=httpx2.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=None if reuse else 0
            ),
            headers={"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {},
            trust_env=False,
        )

    async def ask(
        self, request: WorkloadRequest, path: str, body: dict[str, Any]
    ) -> MeasuredAnswer:
        """The answer to a POST, read to its end. Raises as `stream`."""
        return (await self.stream(path, body)).answer(request)

    async def stream(self, path: str, body: dict[str, Any]) -> Stream:
        """POST, and read the stream to its end. Raises RequestError where the request is at fault,
        else ServerError.

        A request that was sent is not sent again: the server may have counted it.
        """
        stream = Stream()
        begin = perf_counter()
        try:
            async with self.http.stream("POST", self.endpoint.root + path, json=body) as response:
                kind = response.headers.get("content-type", "")
                if response.status_code != 200 or not kind.startswith("text/event-stream"):
                    text = await _beginning(response)
                    raise error_of(response.status_code, text or "it sent nothing")
                # past the end mark: the connection is used again
                async for event in httpx2.EventSource(response):
                    stream.feed(event.data, perf_counter() - begin)
        except (httpx2.HTTPError, OutriderError) as error:
            if not stream.ended:
                raise self._error(error) from error
        if not stream.is_whole:
            raise self._error(ServerError("the stream stopped before its end"))
        return stream

    async def get(self, path: str) -> httpx2.Response:
        """GET. Raises ServerError where no answer comes, or one of another status than 200."""
        try:
            response = await self.http.get(self.endpoint.root + path, follow_redirects=True)
            if response.status_code != 200:
                raise error_of(response.status_code, response.text)
        except (httpx2.HTTPError, OutriderError) as error:
            raise ServerError(str(self._error(error))) from error
        return response

    async def model(self) -> str:
        """The model to ask for: the one that was named, else the only one that the server has.

        Raises ServerError where the server does not answer, ConfigError where it has several.
        """
        if self.endpoint.model is not None:
            return self.endpoint.model
        names = [name for name, _ in await self.models()]
        if len(names) != 1:
            raise ConfigError(
                f"the server at {self.endpoint.url} lists {len(names)} models: name the one to "
                f"ask, --server server_model=NAME{': ' if names else ''}{', '.join(sorted(names))}"
            )
        return names[0]

    async def models(self) -> list[tuple[str, str]]:
        """(name, who it is `owned_by`) of each model; none where the list is none. Raises
        ServerError where the server does not answer."""
        response = await self.get("/v1/models")
        try:
            return [
                (mended(str(entry["id"])), mended(str(entry.get("owned_by") or "")))
                for entry in response.json()["data"]
            ]
        except (ValueError, KeyError, TypeError, AttributeError):
            return []

    def _error(self, error: Exception) -> OutriderError:
        """An error of this server in one line, without the key: servers repeat it in what they
        answer."""
        kind = type(error) if isinstance(error, OutriderError) else ServerError
        words = str(error) or type(error).__name__
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            words = f"no connection ({words}); is the server running there?"
        elif isinstance(error, httpx2.TimeoutException):
            words = f"nothing came for {self._timeout_s:g} s"
        elif isinstance(error, httpx2.HTTPError):
            words = f"the connection was dropped ({words})"
        if self.endpoint.api_key:
            words = words.replace(self.endpoint.api_key, "***")
        return kind(one_line(f"{self.endpoint.root}: {words}", 400))


class Stream:
    """The text of one stream of completion chunks, event by event. Reads no socket, so a test can
    play any stream."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.contents: list[str] = []  # of these, without reasoning
        self.num_characters = 0
        self.logprobs: list[TokenLogprob] = []  # where they were asked for, and given
        self.ttft_s: float | None = None
        # arrival of the last event that belongs to the text; the usage that follows is not
        self.seconds = 0.0
        self.finish_reason: str | None = None
        self.ended = False  # the end mark has come
        # as the server counts them: `usage`, or llama.cpp's `timings`
        self.num_tokens: int | None = None
        self.num_cached: int | None = None
        self.num_drafted: int | None = None  # draft tokens, where llama.cpp's `timings` are given

    @property
    def is_whole(self) -> bool:
        """Whether it came to its end: some servers leave the end mark out, and say why they
        stopped."""
        return self.ended or self.finish_reason is not None

    def feed(self, data: str, now: float) -> None:
        """The data of one event. Raises ServerError, or RequestError where the server refuses only
        now."""
        if not data.strip():
            return  # a heartbeat
        if data.strip() == END:
            self.ended = True
            return
        try:
            chunk = parsed_json(data)
            fault = chunk.get("error")
            if not fault:
                self._take(chunk, now)
        except (ValueError, AttributeError, LookupError, TypeError) as error:
            raise ServerError(
                f"an event of the stream is no chunk of a completion: {one_line(data, 80)}"
            ) from error
        if fault:
            code = fault.get("code") if isinstance(fault, dict) else None
            raise error_of(code, f"the server reported an error in the stream: {data}")
        if self.finish_reason in GIVEN_UP:
            raise ServerError(
                f"the server gave the request up (finish_reason '{self.finish_reason}')"
            )

    def _take(self, chunk: dict[str, Any], now: float) -> None:
        choice = (chunk.get("choices") or [{}])[0]
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning")  # two names of one text
        parts = (choice.get("text"), thought, delta.get("content"))
        text = "".join(part for part in parts if isinstance(part, str))
        reason = choice.get("finish_reason")
        self.logprobs += logprobs_of(choice.get("logprobs"))
        self.num_characters += len(text)
        if self.num_characters > MAX_CHARACTERS:
            raise ServerError(f"the answer is longer than {MAX_CHARACTERS} characters")
        if text:
            self.texts.append(text)
            self.contents += [part for part in (parts[0], parts[2]) if isinstance(part, str)]
            self.ttft_s = now if self.ttft_s is None else self.ttft_s
        if isinstance(reason, str):
            self.finish_reason = reason
        if text or reason:
            self.seconds = now
        usage = chunk.get("usage") or {}
        timings = chunk.get("timings") or {}
        details = usage.get("prompt_tokens_details") or {}
        for count in (timings.get("predicted_n"), usage.get("completion_tokens")):
            if type(count) is int:
                self.num_tokens = count
        for count in (timings.get("cache_n"), details.get("cached_tokens")):
            if type(count) is int:
                self.num_cached = count
        if timings:
            drafted = timings.get("draft_n", 0)  # left out where nothing was drafted
            self.num_drafted = drafted if type(drafted) is int else None

    @property
    def text(self) -> str:
        """All of it, reasoning included."""
        return mended("".join(self.texts))

    def answer(self, request: WorkloadRequest) -> MeasuredAnswer:
        return MeasuredAnswer(
            id=request.id,
            task=request.task,
            seconds=round(self.seconds, 6),
            ttft_s=None if self.ttft_s is None else round(self.ttft_s, 6),
            num_chunks=len(self.texts),
            num_tokens=self.num_tokens,
            num_cached=self.num_cached,
            text=(text := self.text),
            content=None if (content := mended("".join(self.contents))) == text else content,
            turn=request.turn,
        )


def error_of(status: Any, text: str) -> OutriderError:
    """The error of an HTTP status: RequestError where the request is at fault, else ServerError."""
    if type(status) is not int:
        return ServerError(text)
    hint = f" ({HINTS[status]})" if status in HINTS else ""
    at_fault = 400 <= status < 500 and status not in NOT_THE_REQUEST
    return (RequestError if at_fault else ServerError)(f"HTTP {status}: {one_line(text)}{hint}")


async def _beginning(response: httpx2.Response) -> str:
    """The first MAX_MESSAGE bytes of a body."""
    read = b""
    async for piece in response.aiter_bytes():
        read += piece
        if len(read) >= MAX_MESSAGE:
            break
    return read[:MAX_MESSAGE].decode("utf-8", errors="replace")


def one_line(text: str, limit: int = 300) -> str:
    """White space collapsed, cut with an ellipsis."""
    text = " ".join(mended(text).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def mended(text: str) -> str:
    """Pairs of surrogates that JSON escapes brought apart joined, single ones replaced: no file
    takes them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
