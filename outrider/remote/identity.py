"""What two processes must agree on before one drafts for, or answers for, the other: hashes that the handshake compares."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from outrider.errors import CapabilityError
from outrider.messages import template_text
from outrider.remote.protocol import PROTOCOL, messages
from outrider.version import __version__


def vocabulary_hash(tokenizer: Any) -> str:
    """SHA-256 of the table from token ids to pieces."""
    by_id = sorted((token, piece) for piece, token in tokenizer.get_vocab().items())
    return _hash(json.dumps(by_id, ensure_ascii=True))


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of all that turns text and conversations into ids: the tokenizer's own file and the chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return _hash(json.dumps([rules, template_text(tokenizer)]))


def model_identity(name: str, tokenizer: Any, vocab_size: int, model: Mapping[str, Any] | None = None) -> messages.ModelIdentity:
    """The identity of a process's model in a handshake.

    `model` holds what decides its texts (weights' hash, dtype, kernels); None: unknown.
    """
    return messages.ModelIdentity(
        name=name, vocab_size=vocab_size,
        vocabulary_sha256=vocabulary_hash(tokenizer), tokenizer_sha256=tokenizer_hash(tokenizer),
        model_sha256="" if model is None else _hash(json.dumps(model, sort_keys=True, default=str)),
        facts={} if model is None else {name: str(value) for name, value in model.items()},
    )  # fmt: skip


def check_protocol(theirs: messages.Hello | messages.Welcome, who: str) -> None:
    """Raises CapabilityError where the other side speaks another version of the protocol, or none."""
    if theirs.protocol != PROTOCOL:
        spoken = f"version {theirs.protocol} of the protocol (release {theirs.release or 'unknown'})"
        raise CapabilityError(f"{who} speaks {spoken}; this side speaks {PROTOCOL} (release {__version__}): install one release")


def check_vocabulary(ours: messages.ModelIdentity, theirs: messages.ModelIdentity, who: str) -> None:
    """Raises CapabilityError where the same token id may mean something else on the other side."""
    if ours.vocabulary_sha256 != theirs.vocabulary_sha256:
        raise CapabilityError(
            f"{who} works with '{theirs.name}', whose vocabulary ({theirs.vocab_size} wide, {theirs.vocabulary_sha256[:12]}) is "
            f"not that of '{ours.name}' ({ours.vocab_size} wide, {ours.vocabulary_sha256[:12]}): use a model of the same family"
        )


def check_tokenizer(ours: messages.ModelIdentity, theirs: messages.ModelIdentity, who: str) -> None:
    """Raises CapabilityError where the same conversation could become other tokens, or tokens another text."""
    check_vocabulary(ours, theirs, who)
    if ours.tokenizer_sha256 and theirs.tokenizer_sha256 and ours.tokenizer_sha256 != theirs.tokenizer_sha256:
        raise CapabilityError(
            f"{who} works with '{theirs.name}', whose tokenizer or chat template ({theirs.tokenizer_sha256[:12]}) is not that of "
            f"'{ours.name}' ({ours.tokenizer_sha256[:12]}): use the same model folder on both sides"
        )


def check_model(ours: messages.ModelIdentity, theirs: messages.ModelIdentity, who: str) -> None:
    """Raises CapabilityError, naming what differs, where equal requests could get other texts: `ours` answered before."""
    if not ours.model_sha256 or not theirs.model_sha256:
        raise CapabilityError(f"{who} does not say which weights and arithmetic it answers with: install one release everywhere")
    if ours.model_sha256 != theirs.model_sha256:
        names = [name for name in sorted({**ours.facts, **theirs.facts}) if ours.facts.get(name) != theirs.facts.get(name)]
        pairs = ((name, theirs.facts.get(name, "unknown")[:40], ours.facts.get(name, "unknown")[:40]) for name in names)
        each = "; ".join(f"{name} {found} instead of {expected}" for name, found, expected in pairs)
        raise CapabilityError(
            f"{who} would answer with other texts than the replicas beside it ({each or 'hashes differ'}): serve the "
            "same weights in the same way everywhere, or give this one another model name"
        )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
