"""The facts that two processes must agree on before one drafts for the other: hashes that the
handshake compares."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from outrider.errors import CapabilityError
from outrider.remote.protocol import PROTOCOL, messages
from outrider.version import __version__


def vocabulary_hash(tokenizer: Any) -> str:
    """SHA-256 of the table from token ids to pieces."""
    by_id = sorted((token, piece) for piece, token in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(by_id, ensure_ascii=True).encode()).hexdigest()


def model_identity(name: str, tokenizer: Any, vocab_size: int) -> messages.ModelIdentity:
    """The identity of a process's model in a handshake."""
    return messages.ModelIdentity(
        name=name, vocab_size=vocab_size, vocabulary_sha256=vocabulary_hash(tokenizer)
    )


def check_protocol(theirs: messages.Hello | messages.Welcome, who: str) -> None:
    """Raises CapabilityError where the other side speaks another version of the protocol, or none."""
    if theirs.protocol != PROTOCOL:
        spoken = (
            f"version {theirs.protocol} of the protocol (release {theirs.release or 'unknown'})"
        )
        raise CapabilityError(
            f"{who} speaks {spoken}; this side speaks {PROTOCOL} (release {__version__}): install "
            "one release"
        )


def check_vocabulary(
    ours: messages.ModelIdentity, theirs: messages.ModelIdentity, who: str
) -> None:
    """Raises CapabilityError where the same token id may mean something else on the other side."""
    if ours.vocabulary_sha256 != theirs.vocabulary_sha256:
        raise CapabilityError(
            f"{who} works with '{theirs.name}', whose vocabulary ({theirs.vocab_size} wide, "
            f"{theirs.vocabulary_sha256[:12]}) is "
            f"not that of '{ours.name}' ({ours.vocab_size} wide, {ours.vocabulary_sha256[:12]}): "
            "use a model of the same family"
        )
