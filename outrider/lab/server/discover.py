"""What a server is: engine, version, model, and whether it shows its counters. All of it asked, none of it assumed.

An engine is recognised by the prefix of its counters, else by the owner of its model, else by the title of the API's description
(llama-cpp-python calls the owner "me" and the API "llama.cpp Python API").
"""

from __future__ import annotations

from typing import Any

from outrider.errors import ConfigError, ServerError, did_you_mean
from outrider.lab.server.client import HINTS, Client
from outrider.lab.server.counters import read
from outrider.lab.server.options import ServerEndpoint
from outrider.lab.server.stream import error_text, mended, one_line
from outrider.lab.server.types import ServerInfo

VERSIONS = {  # engine -> (path, name of the version in its JSON)
    "vllm": ("/version", "version"),
    "outrider": ("/version", "version"),
    "sglang": ("/server_info", "version"),
    "llamacpp": ("/props", "build_info"),
}
UNKNOWN = "unknown"
UNTITLED = "FastAPI"  # what FastAPI calls an API that was given no title


async def discover(client: Client) -> ServerInfo:
    """What a server says of itself.

    Raises ServerError when there is no server or it refuses, ConfigError when it does not have the model that was
    named.
    """
    models, owner, instead = await _models(client)
    model = _chosen(models, client.endpoint, instead)
    reading, reason = await read(client, model, owner)
    engine = (reading.engine if reading else None) or owner or UNKNOWN
    version = await _version(client, engine) if engine in VERSIONS else None
    if engine not in VERSIONS:
        title, version = await _titled(client)
        engine = title or engine
    notes = [reason] if reason else []
    if reading is not None and reading.engine is None:
        notes.append("the server's /metrics has no counters of vLLM, SGLang, llama.cpp or Outrider")
    return ServerInfo(
        engine=engine,
        version=version,
        model=model,
        metrics=reading is not None and reading.engine is not None,
        notes=notes,
    )


async def _models(client: Client) -> tuple[list[str], str | None, str]:
    """(names of the models, who owns the first, what came instead of a list): no names where the server has no such list."""
    response = await client.get("/v1/models")
    if response.status_code in HINTS and response.status_code != 404:
        reason = error_text(_json(response) or response.text)
        message = f"{client.endpoint.root}: HTTP {response.status_code}: {reason} ({HINTS[response.status_code]})"
        raise ServerError(client.endpoint.clean(message))
    found = _json(response)
    kind = response.headers.get("content-type", "").partition(";")[0].strip() or "data of no type"
    entries = (found or {}).get("data") if response.status_code == 200 else None
    entries = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    names = [mended(entry["id"]) for entry in entries if isinstance(entry.get("id"), str)]
    owner = entries[0].get("owned_by") if entries else None
    is_list = found is not None and isinstance(found.get("data"), list)
    answered = kind if found is None else "an empty list" if is_list else "JSON without a list of models"
    instead = answered if response.status_code == 200 else f"HTTP {response.status_code}"
    return names, one_line(owner, 40) if isinstance(owner, str) else None, one_line(instead, 60)


def _chosen(models: list[str], endpoint: ServerEndpoint, instead: str) -> str:
    wanted, url = endpoint.model, endpoint.url
    if wanted is not None:
        if models and wanted not in models:
            raise ConfigError(f"the server at {url} has no model '{wanted}'.{did_you_mean(wanted, models)}")
        return wanted
    if len(models) == 1:
        return models[0]
    if not models:
        raise ConfigError(
            f"the server at {url} does not list its models (/v1/models: {instead}): is it an OpenAI-compatible server? If so, "
            "name the one to ask"
        )
    raise ConfigError(f"the server at {url} has {len(models)} models; name the one to ask: {', '.join(sorted(models))}")


async def _version(client: Client, engine: str) -> str | None:
    path, name = VERSIONS[engine]
    response = await client.get(path)
    value = (_json(response) or {}).get(name) if response.status_code == 200 else None
    return one_line(str(value), 80) if value else None


async def _titled(client: Client) -> tuple[str | None, str | None]:
    """(title, version) that the API gives itself, where it describes itself at all."""
    response = await client.get("/openapi.json")
    info = (_json(response) or {}).get("info") if response.status_code == 200 else None
    title, version = (info.get("title"), info.get("version")) if isinstance(info, dict) else (None, None)
    if not isinstance(title, str) or not title or title == UNTITLED:
        return None, None
    return one_line(title, 40), one_line(version, 80) if isinstance(version, str) else None


def _json(response: Any) -> dict[str, Any] | None:
    try:
        content = response.json()
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
