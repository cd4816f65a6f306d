"""`outrider pull`, `outrider list` and `--draft auto` against a hub of the test's own, as the real
one answers."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest
from transformers import AutoConfig

from outrider.models.heads.eagle_files import save_eagle
from tests.heads import random_eagle

pytestmark = pytest.mark.slow
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PLAIN = "someone/stories"
GGUF = "someone/smol-GGUF"
HEAD = "someone/stories-eagle3"
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
PIECE = 1 << 16
TIMEOUT_S = 120


Start = Callable[..., subprocess.Popen[str]]


class Ran(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    errors: str


class Hub(ThreadingHTTPServer):
    """Files of repositories. `stall_after`: bytes after which a file of weights stops coming."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files: dict[str, dict[str, Path]] = {}
        self.tags: dict[str, list[str]] = {}
        self.ranges: list[tuple[str, str | None]] = []  # of each file that was asked for
        self.stall_after: int | None = None
        self.stalled = threading.Event()
        self.ended = threading.Event()


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = urlsplit(self.path).path
        if path == "/":
            self._send(b"")
        elif path == "/api/models":
            self._list(parse_qs(urlsplit(self.path).query).get("filter", []))
        elif info := re.fullmatch(r"/api/models/(\w+/[\w-]+)(/revision/\w+|/tree/\w+)?", path):
            self._describe(info[1], info[2] or "")
        elif file := re.fullmatch(r"/(\w+/[\w-]+)/resolve/\w+/(.+)", path):
            self._file(file[1], file[2], with_body)
        else:
            self.send_error(404)

    def _list(self, wanted: list[str]) -> None:
        known = self.server.tags.items()
        found = [{"id": repo, "tags": tags} for repo, tags in known if set(wanted) <= set(tags)]
        self._send(json.dumps(found).encode())

    def _describe(self, repo: str, what: str) -> None:
        if repo not in self.server.files:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        files = self.server.files[repo]
        if what.startswith("/tree"):
            tree = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": _tag(path)}
                for name, path in files.items()
            ]
            self._send(json.dumps(tree).encode())
        else:
            siblings = [{"rfilename": name} for name in files]
            self._send(json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())

    def _file(self, repo: str, name: str, with_body: bool) -> None:
        path = self.server.files.get(repo, {}).get(name)
        if path is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = path.read_bytes()
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{_tag(path)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not with_body:
            return
        self.server.ranges.append((name, asked))
        for position in range(start, len(content), PIECE):
            if self._stalls(name, position):
                return
            self.wfile.write(content[position : position + PIECE])

    def _stalls(self, name: str, position: int) -> bool:
        after = self.server.stall_after
        if after is None or position < after or not name.endswith((".safetensors", ".gguf")):
            return False
        self.wfile.flush()
        self.server.stalled.set()
        self.server.ended.wait(TIMEOUT_S)
        return True

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *values: object) -> None:
        """Nothing: the test says what it wants to know."""


def _tag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@pytest.fixture
def hub(stories: Path, tmp_path: Path) -> Iterator[Hub]:
    """A hub with a checkpoint that has a chat template."""
    server = Hub()
    template = tmp_path / "chat_template.jinja"
    template.write_text(TEMPLATE)
    files = {file.name: file for file in stories.iterdir() if file.is_file()}
    server.files[PLAIN] = files | {"chat_template.jinja": template, "notes.pdf": template}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.ended.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def start(hub: Hub, tmp_path: Path) -> Start:
    """Start a command whose hub that is, with a cache of its own."""

    def begin(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        own = {
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "NO_COLOR": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "outrider", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **own, **environment},
        )

    return begin


def ended(process: subprocess.Popen[str], stdin: str = "") -> Ran:
    out, errors = process.communicate(stdin, timeout=TIMEOUT_S)
    return Ran(process.returncode, out, errors)


def test_what_was_pulled_runs_without_a_network(hub: Hub, start: Start) -> None:
    """Tokenizer and chat template, too; what no model needs is left there."""
    pulled = ended(start("pull", PLAIN))
    assert pulled.code == 0, pulled.errors
    assert pulled.out.splitlines()[-1] == f"outrider run {PLAIN}"
    assert re.match(r"[\d.]+ MiB in \d+ files: /", pulled.out)
    fetched = [name for name, _ in hub.ranges]
    assert "notes.pdf" not in fetched
    again = ended(start("pull", PLAIN))
    assert (again.code, again.out, len(hub.ranges)) == (0, pulled.out, len(fetched))
    hub.files.clear()
    offline = {"HF_HUB_OFFLINE": "1"}
    assert ended(start("pull", PLAIN, **offline)).out == pulled.out
    listed = json.loads(ended(start("list", "--json", **offline)).out)["models"]
    assert [(model["name"], model["format"]) for model in listed[1:]] == [(PLAIN, "safetensors")]
    plain = ("--runtime", "eager", "--threads", "1", "--drafter", "none", "--max-tokens", "5")
    talk = ended(start("run", PLAIN, *plain, **offline), stdin="Once upon\n")
    assert (talk.code, bool(talk.out.strip())) == (0, True), talk.errors


def test_a_gguf_file_by_its_quantisation(hub: Hub, start: Start, smollm: Path) -> None:
    """One file of several. Interrupted, it continues where it ended; it is found again without a
    network."""
    weights = next(smollm.glob("*.gguf"))
    hub.files[GGUF] = {"smol-Q4_1.gguf": weights, "smol-Q8_0.gguf": weights}
    hub.stall_after = 30 << 20
    process = start("pull", f"{GGUF}:Q4_1")
    assert hub.stalled.wait(TIMEOUT_S)
    process.send_signal(signal.SIGINT)
    stopped = ended(process)
    assert stopped.code == 130
    assert stopped.errors.endswith("interrupted: the same command downloads the rest\n")
    hub.stall_after = None
    hub.ranges.clear()
    pulled = ended(start("pull", f"{GGUF}:Q4_1"))
    assert pulled.code == 0, pulled.errors
    assert pulled.out.splitlines()[-1] == f"outrider run {GGUF}:Q4_1"
    ((name, asked),) = hub.ranges
    assert name == "smol-Q4_1.gguf"
    assert int((asked or "").removeprefix("bytes=").rstrip("-")) >= 10 << 20
    offline = {"HF_HUB_OFFLINE": "1"}
    assert ended(start("pull", f"{GGUF}:Q4_1", **offline)).out == pulled.out
    listed = json.loads(ended(start("list", "--json", **offline)).out)["models"]
    assert [model["name"] for model in listed] == ["demo", f"{GGUF}:smol-Q4_1.gguf"]
    assert listed[1]["num_bytes"] == weights.stat().st_size
    wrong = ended(start("pull", f"{GGUF}:Q4_2"))
    assert wrong.code == 2
    assert f"'{GGUF}' has no GGUF file 'Q4_2'. Available: smol-Q4_1.gguf" in wrong.errors


def test_an_interrupted_checkpoint_is_incomplete(hub: Hub, start: Start) -> None:
    """Without a network it is refused by what it lacks; with one the rest comes."""
    hub.stall_after = 3 * PIECE
    process = start("pull", PLAIN)
    assert hub.stalled.wait(TIMEOUT_S)
    process.send_signal(signal.SIGINT)
    assert ended(process).code == 130
    missing = ended(start("pull", PLAIN, HF_HUB_OFFLINE="1"))
    assert missing.code == 2
    assert f"'{PLAIN}'" in missing.errors
    hub.stall_after = None
    assert ended(start("pull", PLAIN)).code == 0


def test_a_companion_that_the_hub_knows(
    hub: Hub, start: Start, stories: Path, tmp_path: Path
) -> None:
    """It is named before it is here, fetched where it is asked for by its name, and taken from then
    on."""
    head = tmp_path / "head"
    save_eagle(random_eagle("eagle3", AutoConfig.from_pretrained(stories), draft_vocab=40), head)
    (head / "model.safetensors").rename(head / "eagle.safetensors")
    hub.files[HEAD] = {file.name: file for file in head.iterdir()}
    hub.tags[HEAD] = [f"base_model:{PLAIN}", "speculative-decoding", "license:mit"]
    hub.tags["someone/chat"] = [f"base_model:{PLAIN}"]
    assert ended(start("pull", PLAIN)).code == 0
    listed = json.loads(ended(start("ls", "drafters-for", PLAIN, "--json")).out)["drafters"]
    assert [(row["drafter"], row["kind"], row["licence"]) for row in listed] == [
        (HEAD, "eagle3", "mit")
    ]
    assert (listed[0]["is_here"], listed[0]["fits"]) == (False, None)
    generate = ("generate", PLAIN, "Once upon", "--max-tokens", "8", "--json", "--threads", "1")
    plain = json.loads(ended(start(*generate, "--drafter", "none")).out)
    without = json.loads(ended(start(*generate, "--draft", "auto")).out)
    assert without["config"]["drafter"] == "suffix"
    assert any(f"downloads nothing: --draft {HEAD}" in note for note in without["notes"])
    assert "eagle.safetensors" not in [name for name, _ in hub.ranges]
    named = json.loads(ended(start(*generate, "--draft", HEAD)).out)
    assert named["config"]["drafter"] == "eagle3"
    fetched = [name for name, _ in hub.ranges]
    assert fetched.count("eagle.safetensors") == 1
    taken = json.loads(ended(start(*generate, "--draft", "auto")).out)
    assert taken["config"]["drafter"] == "eagle3"
    assert any(f"--draft auto: {HEAD} drafts (eagle3" in note for note in taken["notes"])
    assert len(hub.ranges) == len(fetched)
    assert plain["token_ids"] == without["token_ids"] == named["token_ids"] == taken["token_ids"]


def test_a_model_that_is_nowhere_is_named(start: Start) -> None:
    gone = ended(start("pull", "someone/else"))
    assert (gone.code, gone.out) == (2, "")
    assert "'someone/else'" in gone.errors
    offline = ended(start("pull", "someone/else", HF_HUB_OFFLINE="1"))
    assert offline.code == 2
    assert "no model 'someone/else'" in offline.errors
    assert "HF_HUB_OFFLINE forbids" in offline.errors
