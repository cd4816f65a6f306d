"""The options of `outrider export --check` that are about vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from outrider.cli.options import option

if TYPE_CHECKING:
    from outrider.train.export import Target
    from outrider.train.vllm.compare import Comparing

PANEL = "--check, in vLLM"


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """Options that say where vLLM is and what both engines draft for."""

    vllm: Annotated[
        str | None, option(PANEL, "A Python that has vLLM.", metavar="PYTHON", show_default="this one, where it has vLLM")
    ] = None
    vllm_timeout: Annotated[float, option(PANEL, "Seconds until vLLM must be done, its start included.", min=1)] = 900.0
    workload: Annotated[
        str | None,
        option(
            PANEL, "A prompts file, or a built-in name (docs/workloads.md).", metavar="FILE_OR_NAME",
            show_default="demo for the demo target, else embedded:reasoning",
        ),
    ] = None  # fmt: skip
    prompts: Annotated[int, option(PANEL, "Its first prompts.", min=1)] = 16
    max_new_tokens: Annotated[int, option(PANEL, "Tokens of every answer.", min=2)] = 64
    num_draft_tokens: Annotated[
        int | None,
        option(PANEL, "Draft tokens per step.", min=1, show_default="4; what the head can, if that is fewer; a block whole"),
    ] = None
    threads: Annotated[int | None, option(PANEL, "CPU threads of both.", min=1, show_default="each engine's choice")] = None

    def comparing(self, kind: str, source: Path, target: Target) -> Comparing:
        """Raises ConfigError for prompts that cannot be read or do not fit, and for a draft length that it does not have."""
        from outrider.build import DEMO
        from outrider.lab.workload.load import load_workload
        from outrider.train.vllm.compare import Comparing, method_for, prompt_tokens

        name = self.workload or (DEMO if target.called == DEMO else "embedded:reasoning")
        tokens = prompt_tokens(load_workload(name, limit=self.prompts), target, self.max_new_tokens)
        method = method_for(kind, source, target, self.num_draft_tokens)
        return Comparing(tokens, method, self.max_new_tokens, self.threads, self.vllm_timeout)
