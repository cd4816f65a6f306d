"""Files of strangers: each is read, or refused in one line, whatever is in it. Never a traceback,
nor a process that ends."""

from __future__ import annotations

import ast
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.errors import CheckpointError, ConfigError, OutriderError
from outrider.lab.result import read_result
from outrider.models.gguf.header import read_gguf
from outrider.models.heads.block_files import load_block
from outrider.models.heads.eagle_files import TargetSizes, load_eagle
from outrider.models.heads.medusa import load_medusa
from outrider.models.loading.memory import folder_weights_bytes
from outrider.models.loading.weight_files import safetensors_header, weight_files
from outrider.serve.config_file import read_config
from outrider.settings_file import read_settings
from outrider.train.train_result import ExportResult
from outrider.wellformed import (
    FLAT,
    MAX_DEPTH,
    _is_flat,
    load_json,
    parsed_json,
    read_json,
    read_toml,
)
from tests.fuzz import altered, altered_bytes
from tests.heads import block_head, eagle_head, medusa_heads
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama
from tests.unit.runtime.test_kept import a_gguf

PACKAGE = Path(__file__).resolve().parents[3] / "outrider"
GREEDY = SamplingParams(temperature=0, max_tokens=2)
LONGEST = 700  # characters of a message
IN_MEMORY = frozenset((  # read texts of a wire or of this process, no files
    "messages.py", "grammar/grammars.py", "grammar/specs.py", "serve/api/messages.py",
    "serve/tools/values.py", "serve/tools/json_calls.py", "serve/tools/grammar.py", "engine/warmup.py", "lab/server/client.py",
    "lab/journal.py", "train/responses.py", "train/run.py", "models/tokens/token_bytes.py", "integrations/vllm/options.py",
    "grammar/numbers.py",
    "serve/api/spelling.py", "grammar/trial.py", "grammar/trial_process.py",
    "models/card.py", "runtime/first_start.py",
))  # fmt: skip
READERS = {"wellformed.py": "loads"}


def is_fine(read: Callable[[], object]) -> bool:
    """Whether a file is read. One that is not must be refused in one line."""
    message = ""
    try:
        read()
    except OutriderError as error:
        message = str(error) or "nothing said"
    assert len(message.splitlines()) <= 1, message
    assert len(message) < LONGEST, message
    return not message


def seeds(quick: int, many: int) -> list[Any]:
    """Ranges of seeds: a few for every run, many at night."""
    return [range(quick), pytest.param(range(quick, many), marks=pytest.mark.nightly)]


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with nothing wrong."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    model = tiny_llama(len(tokenizer))
    model.generation_config.update(do_sample=True, temperature=0.7, top_k=5)
    return save_checkpoint(tmp_path / "model", model, tokenizer)


def runs(model: Path) -> None:
    """Load it and write a text."""
    LLM(model, drafter="none", dtype="float32", runtime="eager", threads=1).generate("abc", GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", seeds(12, 300))
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_json_of_a_checkpoint(name: str, numbers: range, folder: Path) -> None:
    """One value is another, or not there."""
    content = json.loads((folder / name).read_text())
    read = 0
    for seed in numbers:
        new, _ = altered(content, random.Random(seed))
        (folder / name).write_text(json.dumps(new))
        read += is_fine(lambda: runs(folder))
    assert read, "most changes do no harm"


@pytest.mark.parametrize("numbers", seeds(300, 3000))
def test_headers_and_indexes(numbers: range, folder: Path) -> None:
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    blob = single.read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    read = 0
    for seed in numbers:
        chance = random.Random(seed)
        if seed % 2:
            text = json.dumps(altered(header, chance)[0]).encode()
            single.write_bytes(struct.pack("<Q", len(text)) + text + blob[8 + length :])
        else:
            single.write_bytes(altered_bytes(blob, chance, 8 + length)[0])
        read += is_fine(lambda: folder_weights_bytes(folder, torch.float32))
    assert read
    single.write_bytes(blob)
    weights = load_file(single)
    single.unlink()
    save_file(weights, folder / "model-00001-of-00001.safetensors")
    whole = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors"),
    }
    for seed in numbers:
        index.write_text(json.dumps(altered(whole, random.Random(seed))[0]))
        read += is_fine(lambda: [safetensors_header(file) for file in weight_files(folder)])
    assert read


@pytest.mark.slow
@pytest.mark.parametrize("numbers", seeds(30, 600))
def test_a_gguf_file(numbers: range, tmp_path: Path) -> None:
    """Sizes of tensors that are others, and bytes of the header."""
    file = a_gguf(tmp_path)
    blob = file.read_bytes()
    tensors = read_gguf(file).tensors
    end = min(tensor.start for tensor in tensors)
    for seed in numbers:
        chance = random.Random(seed)
        tensor = random.Random(seed).choice(tensors)
        new = altered_bytes(blob, chance, end)[0]
        if seed % 2:
            name = tensor.name.encode()
            place = (
                blob.rindex(name, 0, end) + len(name) + 4 + 8 * chance.randrange(len(tensor.shape))
            )
            size = chance.choice((0, 1, 8, 32, 64, 96, 577, 2**31, 2**63))
            new = blob[:place] + size.to_bytes(8, "little") + blob[place + 8 :]
        file.unlink()  # or what is mapped would change
        file.write_bytes(new)
        is_fine(lambda: runs(file))


@pytest.mark.parametrize("size", [8, 577])
def test_a_projection_of_another_size_in_a_gguf_file(size: int, tmp_path: Path) -> None:
    file = a_gguf(tmp_path)
    blob = file.read_bytes()
    place = blob.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4
    for number in (0, 8):
        file.unlink()
        file.write_bytes(
            blob[: place + number] + size.to_bytes(8, "little") + blob[place + number + 8 :]
        )
        with pytest.raises(CheckpointError, match="damaged"):
            runs(file)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", seeds(60, 1000))
def test_configs_of_heads(numbers: range, tmp_path: Path) -> None:
    target = tiny_llama(257, num_hidden_layers=4)
    sizes = TargetSizes.of(target.config, 257)
    kinds: dict[str, tuple[Callable[[Any, Path], None], Callable[[Path], object]]] = {
        "eagle3": (eagle_head("eagle3", 100), lambda head: load_eagle(head, "eagle3", sizes)),
        "eagle": (eagle_head("eagle", None), lambda head: load_eagle(head, "eagle", sizes)),
        "block": (block_head, lambda head: load_block(head, sizes.hidden_size, 257, 4)),
        "medusa": (medusa_heads, lambda head: load_medusa(head, sizes.hidden_size, 257)),
    }
    for kind, (make, load) in kinds.items():
        head = tmp_path / f"{kind}{numbers.start}"
        make(target, head)
        content = json.loads((head / "config.json").read_text())
        read = 0
        for seed in numbers:
            (head / "config.json").write_text(json.dumps(altered(content, random.Random(seed))[0]))
            read += is_fine(lambda load=load, head=head: load(head))  # type: ignore[misc]
        assert read
        for wrong in (
            {"rope_scaling": 1},
            {"rope_parameters": [1]},
            {"outrider": 3},
            {"speculators_config": []},
        ):
            (head / "config.json").write_text(json.dumps({**content, **wrong}))
            is_fine(lambda load=load, head=head: load(head))  # type: ignore[misc]


SETTINGS = {
    "outrider_settings": 1, "target": "demo", "options": {"drafter": "ngram", "num_draft_tokens": 3, "drafter_options": {"n": 2}},
    "for_tasks": {"code": {"drafter": "suffix"}}, "for_batch_sizes": {"4": {"drafter": "none"}}, "why": "because",
}  # fmt: skip
SERVER = """
[server]
port = 8000
api_keys = ["a"]

[[models]]
name = "small"
target = "demo"
drafter = "ngram"
max_num_seqs = 4
extra_drafters = ["suffix"]

[[routes]]
model = "auto"
max_prompt_tokens = 20
to = "small"
"""


def test_settings_reports_and_the_servers_file(tmp_path: Path) -> None:
    result = ExportResult(source="a", layout="raw", drafter="eagle3", target="demo", checks=[])
    text = json.loads(result.model_dump_json())
    file = tmp_path / "file"
    read = {"settings": 0, "result": 0, "server": 0}
    for seed in range(300):
        chance = random.Random(seed)
        file.write_text(json.dumps(altered(SETTINGS, chance)[0]))
        read["settings"] += is_fine(lambda: read_settings(file))
        file.write_text(json.dumps(altered(text, chance)[0]))
        read["result"] += is_fine(lambda: read_result(file))
        file.write_bytes(altered_bytes(SERVER.encode(), chance)[0])
        read["server"] += is_fine(lambda: read_config(file, {}))
    assert all(read.values())


DEEP = [MAX_DEPTH + 1, 1000, 5000, 300_000]


@pytest.mark.parametrize("depth", DEEP)
def test_files_that_are_nested_deep(depth: int, folder: Path) -> None:
    nested = {"list": "[" * depth + "]" * depth, "object": '{"a":' * depth + "1" + "}" * depth}
    for text in nested.values():
        with pytest.raises(ValueError, match=f"nested deeper than {MAX_DEPTH}"):
            parsed_json(text)
        file = folder / "file.json"
        file.write_text(text)
        for read in (read_settings, read_result, lambda path: read_json(path, "it")):
            with pytest.raises(ConfigError, match=f"nested deeper than {MAX_DEPTH}"):
                read(file)
    deep = '{"model_type": "llama", "a": ' + nested["list"] + "}"
    config = (folder / "config.json").read_text()
    for name in ("config.json", "tokenizer_config.json"):
        before = (folder / name).read_text()
        (folder / name).write_text(deep)
        with pytest.raises(
            CheckpointError, match=f"{name}' is damaged: it is nested deeper than {MAX_DEPTH}"
        ):
            runs(folder)
        (folder / name).write_text(before)
    assert (folder / "config.json").read_text() == config
    for text in (deep, nested["object"]):
        header = text.encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        with pytest.raises(CheckpointError, match="its header cannot be read"):
            runs(folder)


def nested(drawn: random.Random, depth: int) -> Any:
    kind = drawn.random()
    if not depth or kind < 0.2:
        return drawn.choice(['a"b', "[[{", "\\", '\\"]', 'x\\\\"[', 1, None, "}}]]", '"'])
    parts = [nested(drawn, depth - 1) for _ in range(drawn.randint(0, 3))]
    return parts if kind < 0.6 else {f'{number}\\"{{[': part for number, part in enumerate(parts)}


def depth_of(value: Any) -> int:
    parts = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    )
    return 0 if parts is None else 1 + max(map(depth_of, parts), default=0)


def test_flat_texts_are_told_from_deep_ones() -> None:
    """Whatever brackets, quotes and backslashes stand in their strings."""
    drawn = random.Random(0)
    values = [nested(drawn, drawn.randint(0, FLAT + 4)) for _ in range(2000)]
    assert [_is_flat(json.dumps(value)) for value in values] == [
        depth_of(value) <= FLAT for value in values
    ]
    assert {depth_of(value) <= FLAT for value in values} == {True, False}


@pytest.mark.parametrize("depth", DEEP)
def test_toml_that_is_nested_deep(depth: int, tmp_path: Path) -> None:
    """Of long keys the parser would take memory as the square of their length."""
    file = tmp_path / "server.toml"
    key = ".".join(["a"] * depth)
    lists = f"a = {'[' * depth}{']' * depth}"
    tables = f"a = {'{b = ' * depth}1{'}' * depth}"
    for text in (lists, tables, f"{key} = 1", f"[{key}]\nb = 1"):
        file.write_text(text)
        with pytest.raises(
            ConfigError, match=r"is not TOML: it (is nested deeper|has more than 1 MiB)"
        ):
            read_toml(file, "it")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", {"dtype": 1.5}, "dtype"),
        ("config.json", {"architectures": [8]}, "architectures"),
        ("config.json", {"num_hidden_layers": 1 << 20}, "different models"),
        ("config.json", {"hidden_size": 1 << 20, "head_dim": 16}, "different models"),
        ("generation_config.json", {"eos_token_id": [1, "a"]}, "eos_token_id"),
        ("tokenizer_config.json", {"model_max_length": {"a": 1}}, "model_max_length"),
    ],
)
def test_values_of_another_type(
    name: str, change: dict[str, Any], message: str, folder: Path
) -> None:
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**content, **change}))
    with pytest.raises(CheckpointError, match=message):
        runs(folder)


@pytest.mark.parametrize(
    "names",
    [["a", "b"], 3, None, {"a": 1}, {"a": ["b"]}, {"a": "../../etc/passwd"}, {"a": "/etc/passwd"}],
)
def test_an_index_that_is_none(names: Any, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match=r"index.json' is damaged"):
        runs(folder)


@pytest.mark.parametrize("place", ["vocab", "added"])
def test_an_id_far_beyond_the_tokens(place: str, folder: Path) -> None:
    """A table that is as long as the largest id takes all memory."""
    content = json.loads((folder / "tokenizer.json").read_text())
    if place == "vocab":
        content["model"]["vocab"][next(iter(content["model"]["vocab"]))] = 1 << 31
    else:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        content["added_tokens"].append({"id": 1 << 31, "content": "<far>", **flags})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"tokens, and one with the id 2147483648"):
        runs(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"]
)
@pytest.mark.parametrize("kind", ["pipe", "zero"])
def test_what_is_no_file(name: str, kind: str, folder: Path) -> None:
    """A pipe that nobody writes to never begins, and /dev/zero never ends."""
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="no regular file"):
        runs(folder)


def test_torchs_advice_is_not_passed_on(folder: Path) -> None:
    """It would have the user run a stranger's code."""
    (folder / "model.safetensors").unlink()
    torch.save(
        {"model.norm.weight": torch.ones(3), "more": random.Random(1)}, folder / "pytorch_model.bin"
    )
    with pytest.raises(CheckpointError, match="could run code and is not read") as caught:
        runs(folder)
    assert "weights_only" not in str(caught.value)


def test_too_large_and_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    file.write_text("[1]")
    assert load_json(file) == [1]
    monkeypatch.setattr("outrider.wellformed.MAX_BYTES", 2)
    with pytest.raises(ConfigError, match="it is not JSON: it has more than"):
        read_json(file, "it")


@pytest.mark.slow
def test_files_are_read_by_one_reader() -> None:
    """A place that parses JSON or TOML itself has no limits."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("json.loads", "json.JSONDecoder") and name in IN_MEMORY:
                assert not any(
                    word in ast.unparse(node)
                    for word in ("read_text", "read_bytes", ".read(", "line)")
                ), name
            elif called in (
                "json.load",
                "json.loads",
                "json.JSONDecoder",
                "tomllib.load",
                "tomllib.loads",
            ):
                found += (
                    [name] if READERS.get(name, "") not in called or name not in READERS else []
                )
    assert not found, "use outrider/wellformed.py"
