"""What decides a replica's texts, as named facts: a coordinator mixes only replicas that agree in all of them.

Weights count by the content of their files, arithmetic by the bits of the logits it gives to a few tokens: kernels, programs,
quantisation and the processor's instructions all show there. Hashing reads every weight file once; the result is remembered by
the file's path, size and time.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from outrider.build import Built
from outrider.cache import cache_folder, keep_json, keeping, kept_json
from outrider.models.lm import LM
from outrider.models.probes.probe import probe_tokens
from outrider.models.source import resolve

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")
NOT_COMPARED = ("_name_or_path", "transformers_version")  # of the config
PROBED = (31, 5, 1)  # tokens of the passes whose logits are hashed


def model_facts(built: Built) -> dict[str, str]:
    """The facts, by name. To be asked before the engine starts: it makes passes on a twin of the target."""
    target, verifier = built.target, built.decoder.verifier
    config = {name: value for name, value in target.card.values.items() if name not in NOT_COMPARED}
    facts = {
        "weights": weights_hash(target.name, target.card.commit),
        "config": _digest(json.dumps(config, sort_keys=True, default=str).encode()),
        "dtype": str(target.lm.dtype).removeprefix("torch."),
        "quantise": str(built.options.quantise),
        "device": target.lm.device.type,
        "programs": type(target.lm.run).__name__,
        "arithmetic": arithmetic_hash(target.lm),
        "ends": ",".join(map(str, sorted(target.eos_token_ids))),
    }
    if not verifier.lossless:  # then the drafter's choices are in the text, too
        options = built.options
        facts["lossy"] = f"{verifier.name} {options.verifier_options} {options.drafter} {options.num_draft_tokens}"
    return facts


def weights_hash(name: str, commit: str | None) -> str:
    """SHA-256 of a folder's weight files, or of a GGUF file and its shards; for a hub id its commit. An adapter's has that of its
    base."""
    source = resolve(name, fetches=False)
    base = "" if source.base is None else weights_hash(source.base.name, commit)
    path = Path(name)
    if source.gguf is not None:
        files = sorted(source.gguf.paths)
    elif path.is_dir():
        files = sorted({file for pattern in WEIGHTS for file in path.glob(pattern)})
    else:
        return f"{name}@{commit or 'unknown'}"
    kept = cache_folder() / "weight-hashes" / "files.json"
    known = kept_json(kept, _hashes) or {}
    hashes = [_file_hash(file, known) for file in files]
    with keeping("hashes of weights"):
        keep_json(kept, known, max_files=1)
    return _digest(json.dumps([base, *zip([file.name for file in files], hashes, strict=True)]).encode())


@torch.inference_mode()
def arithmetic_hash(target: LM) -> str:
    """SHA-256 of the logits' bits in passes of several widths over a few tokens, on a cache of its own."""
    lm = target.twin()
    lm.kv.add_row()
    tokens = probe_tokens(lm.shape.vocab_size, sum(PROBED), lm.device)
    digest, start = hashlib.sha256(), 0
    for width in PROBED:
        logits = lm.forward(tokens[:, start : start + width]).logits
        digest.update(logits.float().cpu().contiguous().numpy().tobytes())
        lm.kv.advance(0, width)
        start += width
    return digest.hexdigest()[:16]


def _hashes(content: Any) -> dict[str, str]:
    if not all(isinstance(value, str) for value in content.values()):
        raise TypeError("a hash is a text")
    return dict(content)


def _file_hash(file: Path, known: dict[str, str]) -> str:
    state = file.stat()
    key = f"{file.resolve()} {state.st_size} {state.st_mtime_ns}"
    if key not in known:
        with file.open("rb") as content:
            known[key] = hashlib.file_digest(content, "sha256").hexdigest()
    return known[key]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
