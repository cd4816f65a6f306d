"""The options of a decoder (`Options`), and its needs of the models that are loaded for it
(`Needs`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral
from typing import Any

from outrider.configuration import spelled_out
from outrider.drafters.requirements import DraftsWithHead
from outrider.errors import ConfigError
from outrider.parts import Parts

AUTO, NATIVE, GRAPHS, EAGER = RUNTIMES = ("auto", "native", "graphs", "eager")  # how passes run
QUANTISE_BITS = (4, 8)
KINDS: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (Integral, "a whole number", ("threads", "max_num_seqs", "max_model_len")),
    (bool, "True or False", ("lossy", "trust_remote_code")),  # the text "false" is true
    (Mapping, "a dictionary", ("drafter_options", "verifier_options")),
    (str, "a text", ("drafter", "verifier", "dtype", "device", "runtime", "revision")),
)
DEMO = "demo"  # the name of the embedded pair, as target and as draft


@dataclass(frozen=True)
class Options:
    """Everything that shapes a decoder; what `LLM(...)` and the command line fill in."""

    target: str
    # a name, or in one text with options: "suffix k=auto:12 max_depth=32 verifier=gumbel"
    drafter: str = "auto"
    draft: str | None = None
    # of a draft service, which drafter 'remote' asks; "local": one that is started here
    draft_endpoint: str | None = None
    # nodes per row and step; "auto" or "auto:12"; None: the drafter's default
    num_draft_tokens: int | str | None = None
    drafter_options: dict[str, Any] = field(default_factory=dict)
    verifier: str = "auto"
    verifier_options: dict[str, Any] = field(default_factory=dict)
    lossy: bool = False
    dtype: str = "auto"
    # bits that the target's linear layers are rounded to on loading: 4 or 8
    quantise: int | None = None
    device: str = "auto"
    threads: int | None = None
    runtime: str = AUTO
    max_num_seqs: int = 8
    max_model_len: int | None = None
    trust_remote_code: bool = False
    revision: str | None = None

    def __post_init__(self) -> None:
        for kind, called, names in KINDS:
            for name in names:
                # None says that it is left out
                value = getattr(self, name)
                is_open = getattr(Options, name, called) is None
                fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
                if not (fits or (value is None and is_open)):
                    raise ConfigError(f"{name} must be {called}, got {value!r:.80}")
        if len(self.drafter.split()) > 1:
            for name, value in spelled_out(vars(self)).items():
                object.__setattr__(self, name, value)
        for name in ("target", "draft"):  # a shell expands ~ at the beginning of a word alone
            if isinstance(path := getattr(self, name), str) and path.startswith("~"):
                object.__setattr__(self, name, os.path.expanduser(path))
        if self.runtime not in RUNTIMES:
            raise ConfigError(
                f"runtime must be one of {', '.join(RUNTIMES)}; got '{self.runtime}'."
            )
        if self.quantise not in (None, *QUANTISE_BITS) or isinstance(self.quantise, bool):
            raise ConfigError(
                f"quantise must be 4 or 8 (bits of a weight), or left out; got {self.quantise!r}"
            )
        if not 1 <= self.max_num_seqs <= 4096:
            raise ConfigError(f"max_num_seqs must be between 1 and 4096, got {self.max_num_seqs}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads must be at least 1, got {self.threads}")
        if self.threads is not None and self.threads > (
            max_threads := max(64, 4 * (os.cpu_count() or 1))
        ):
            raise ConfigError(
                f"threads must be between 1 and {max_threads} on this machine, got {self.threads}"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len must be at least 2, got {self.max_model_len}")


@dataclass(frozen=True)
class Needs:
    """The needs of one decoder, or of several that share models."""

    draft: bool = False  # a draft model
    module: bool = False  # the target's own weights, alongside its packed ones
    # tokens that calls of a recorded loop draft (CUDA graphs); none: no loop
    loop_lengths: tuple[int, ...] = ()
    # trained heads that draft, and their folders
    heads: tuple[tuple[DraftsWithHead, str], ...] = ()
    max_nodes: int = 0  # that a row drafts in a step

    @classmethod
    def of(cls, parts: Parts) -> Needs:
        required = parts.requirements
        return cls(
            required.draft,
            required.module,
            parts.loop_lengths,
            required.heads,
            parts.length.max_nodes,
        )

    @property
    def tables(self) -> bool:
        """Whether a head reads the target's embedding or output layer."""
        return any(kind.requires.head for kind, _ in self.heads)

    @classmethod
    def of_all(cls, several: Sequence[Parts]) -> Needs:
        """The needs of several decoders together. With programs that make up any length they share
        the drafting loop, too."""
        each = [cls.of(replace(parts, any_length=True)) for parts in several]
        heads = tuple(dict.fromkeys(head for n in each for head in n.heads))
        loops = max(n.loop_lengths for n in each)
        nodes = max(n.max_nodes for n in each)
        return cls(any(n.draft for n in each), any(n.module for n in each), loops, heads, nodes)


def replaced(options: Options, **changes: Any) -> Options:
    """The options with some of them changed, and checked again."""
    return Options(**{**asdict(options), **changes})
