"""The options of a decoder (`Options`), and its needs of the models that are loaded for it
(`Needs`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from outrider.configuration import spelled_out
from outrider.drafters.requirements import DraftsWithHead
from outrider.errors import ConfigError
from outrider.parts import Parts
from outrider.prefill import PrefillSettings
from outrider.settings import checked, setting

Runtime = Literal["auto", "native", "graphs", "eager"]  # how passes run
AUTO, NATIVE, GRAPHS, EAGER = get_args(Runtime)
DEMO = "demo"  # the name of the embedded pair, as target and as draft


@checked()
@dataclass(frozen=True)
class Options:
    """Everything that shapes a decoder; what `LLM(...)` and the command line fill in."""

    target: str
    # a name, or in one text with options: "suffix k=auto:12 max_depth=32 verifier=gumbel"
    drafter: str = "auto"
    draft: str | None = None
    # of a draft service, which drafter 'remote' asks
    draft_endpoint: str | None = None
    # nodes per row and step; "auto" or "auto:12"; None: the drafter's default
    num_draft_tokens: int | str | None = None
    drafter_options: dict[str, Any] = field(default_factory=dict)
    verifier: str = "auto"
    verifier_options: dict[str, Any] = field(default_factory=dict)
    lossy: bool = False
    # in one text, "keep=0.2 draft=early:8"; None: prompts are read whole
    prefill: str | None = None
    dtype: str = "auto"
    # bits that the target's linear layers are rounded to on loading
    quantise: Literal[4, 8] | None = None
    device: str = "auto"
    threads: int | None = setting(None, "CPU threads", at_least=1)
    runtime: Runtime = "auto"
    max_num_seqs: int = setting(8, "rows decoded together", at_least=1, at_most=4096)
    max_model_len: int | None = setting(None, "longest prompt plus answer", at_least=2)
    trust_remote_code: bool = False
    revision: str | None = None

    @property
    def prefill_settings(self) -> PrefillSettings | None:
        """`prefill`, read."""
        return None if self.prefill is None else PrefillSettings.parse(self.prefill)

    def __post_init__(self) -> None:
        if self.prefill is not None:
            PrefillSettings.parse(self.prefill)  # raises what is wrong with it
        if len(self.drafter.split()) > 1:
            for name, value in spelled_out(vars(self)).items():
                object.__setattr__(self, name, value)
        for name in ("target", "draft"):  # a shell expands ~ at the beginning of a word alone
            if (path := getattr(self, name)) is not None and path.startswith("~"):
                object.__setattr__(self, name, os.path.expanduser(path))
        max_threads = max(64, 4 * (os.cpu_count() or 1))
        if self.threads is not None and self.threads > max_threads:
            raise ConfigError(
                f"threads must be between 1 and {max_threads} on this machine, got {self.threads}"
            )

    def with_free_length(self) -> Options:
        """With draft lengths that follow measured times, where nothing says otherwise: not for
        drafts of another machine, which would be timed at every start, nor with a verifier under
        which texts depend on the drafts."""
        is_free = (
            self.num_draft_tokens is None
            and self.drafter not in ("none", "remote")
            and self.draft_endpoint is None
            and self.verifier == "auto"
        )
        return replace(self, num_draft_tokens="auto") if is_free else self


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
