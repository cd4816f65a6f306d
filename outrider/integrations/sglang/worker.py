"""The worker of OUTRIDER: SGLang's n-gram worker, which asks our drafter instead of its table of
n-grams."""

from __future__ import annotations

import inspect
import logging
import os
from importlib import import_module
from typing import Any

from outrider.errors import CapabilityError, ConfigError
from outrider.integrations.sglang.lookups import Lookups
from outrider.integrations.sglang.tested import OTHERWISE, TESTED
from outrider.integrations.vllm.drafting import BatchDrafter
from outrider.integrations.vllm.lookups import LookupPlan
from outrider.integrations.vllm.options import read_options
from outrider.integrations.vllm.target import TextOnly

log = logging.getLogger("sglang.outrider")  # below SGLang's logger, whose handlers a server has
MODULE = "sglang.srt.speculative.ngram_worker"
WORKER = "NGRAMWorker"
TABLE = "NgramCorpus"
ARGUMENTS = {  # of what is called or replaced, in SGLang 0.5.19
    (WORKER, "__init__"): ("self", "server_args", "gpu_id", "ps", "nccl_port", "target_worker"),
    (WORKER, "_prepare_draft_tokens"): ("self", "batch"),
    (TABLE, "batch_get"): ("self", "req_ids", "batch_tokens", "total_lens"),
}


def worker_class() -> type:
    """The class that SGLang builds once for each rank. Raises CapabilityError for an SGLang whose
    worker is another one."""
    module = import_module(MODULE)
    check_interface(module)

    class OutriderWorker(module.NGRAMWorker):  # type: ignore[name-defined]
        """Drafts from texts, in SGLang's steps."""

        max_trie_depth: int  # tokens at the end of a text that drafts are asked for with

        def __init__(
            self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any
        ) -> None:
            """Raises ConfigError or CapabilityError for a drafter that cannot work here."""
            table = getattr(module, TABLE)
            setattr(
                module,
                TABLE,
                lambda **given: make_lookups(
                    server_args, ps, target_worker, given["draft_token_num"]
                ),
            )
            try:  # it makes its table by this name, and needs none
                super().__init__(server_args, gpu_id, ps, nccl_port, target_worker)
            finally:
                setattr(module, TABLE, table)
            # ends of texts hold what a step can add
            self.max_trie_depth = max(self.max_trie_depth, self.draft_token_num)

        def _prepare_draft_tokens(self, batch: Any) -> Any:
            self.ngram_corpus.see(batch.reqs)
            return super()._prepare_draft_tokens(batch)

    return OutriderWorker


def check_interface(module: Any) -> None:
    """Raises CapabilityError where names or arguments differ from those that are known."""
    for (owner, method), arguments in ARGUMENTS.items():
        function = getattr(getattr(module, owner, None), method, None)
        if function is None:
            raise CapabilityError(
                f"{OTHERWISE} its n-gram worker has no {owner}.{method}: install sglang {TESTED}"
            )
        if tuple(inspect.signature(function).parameters) != arguments:
            takes = ", ".join(inspect.signature(function).parameters)
            raise CapabilityError(
                f"{OTHERWISE} {owner}.{method} takes {takes}: install sglang {TESTED}"
            )


def make_lookups(server_args: Any, ps: Any, target_worker: Any, num_tokens: int) -> Lookups:
    """Build the drafter from the environment's options and SGLang's model.

    Raises ConfigError or CapabilityError for a drafter that cannot work.
    """
    chosen = read_options(None, os.environ)
    model = target_worker.model_config
    if num_tokens < 2:
        raise ConfigError(
            "--speculative-num-draft-tokens counts the last token of the text, too: 2 at least, "
            f"got {num_tokens}"
        )
    target = TextOnly(
        model.model_path,
        int(model.vocab_size),
        int(model.context_len),
        server_args.tokenizer_path or model.model_path,
        getattr(server_args, "revision", None),
        bool(server_args.trust_remote_code),
    )
    try:
        plan = LookupPlan.choose(chosen)
        if not plan.repeatable and getattr(ps, "tp_size", 1) > 1:
            raise CapabilityError(
                f"drafter '{chosen.drafter}' may answer otherwise when asked twice, and the "
                f"{ps.tp_size} tensor-parallel ranks, "
                "each with its own, must draft alike: serve without --tp-size, or choose a "
                "look-up drafter"
            )
        drafter = plan.build(target, num_tokens - 1)
    except (CapabilityError, ConfigError) as error:  # the same reasons hold here
        raise type(error)(str(error).replace("vLLM", "SGLang")) from error
    log.info("Outrider drafts with '%s', up to %d tokens a step.", chosen.drafter, num_tokens - 1)
    return Lookups(
        BatchDrafter(drafter, chosen.drafter, target.vocab_size), num_tokens, target.context_length
    )
