"""A stand-in for SGLang's n-gram worker and what is around it, with the names and arguments of
0.5.19.

The "model" is a rule from the text so far to the next token. With `overlap`, a request's
`output_ids` are one step behind, and the worker adds what the last step accepted, as SGLang does.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

VOCABULARY = 40
CONTEXT = 120


def rule(tokens: list[int]) -> int:
    """Copies from six tokens back mostly, so that look-ups find something, and departs from it now
    and then."""
    if len(tokens) < 6 or sum(tokens[-3:]) % 7 == 0 or len(tokens) % 13 == 0:
        return (sum(tokens[-2:]) * 7 + len(tokens)) % VOCABULARY
    return tokens[-6]


class NgramCorpus:
    """The table that must not be made."""

    def __init__(self, max_trie_depth: int = 18, draft_token_num: int = 8) -> None:
        raise AssertionError("SGLang's own table was made")

    def batch_get(self, req_ids: Any, batch_tokens: Any, total_lens: Any) -> Any:
        """As its drafts are asked for."""


class NGRAMWorker:
    """What our worker derives from."""

    def __init__(
        self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any
    ) -> None:
        self.draft_token_num = server_args.speculative_num_draft_tokens
        self.max_trie_depth = server_args.speculative_ngram_max_trie_depth
        self.enable_overlap = not server_args.disable_overlap_schedule
        made_by = stand_in.NgramCorpus
        self.ngram_corpus = made_by(
            max_trie_depth=self.max_trie_depth, draft_token_num=self.draft_token_num
        )

    def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        ends = []
        lengths = []
        for request in batch.reqs:
            tokens = [
                *request.origin_input_ids,
                *request.output_ids,
                *(request.accepted if self.enable_overlap else []),
            ]
            ends.append(tokens[-self.max_trie_depth :])
            lengths.append(len(tokens))
        self.ngram_corpus.synchronize()
        return self.ngram_corpus.batch_get([request.rid for request in batch.reqs], ends, lengths)


stand_in = ModuleType("sglang.srt.speculative.ngram_worker")
stand_in.NGRAMWorker = NGRAMWorker
stand_in.NgramCorpus = NgramCorpus


@dataclass
class Request:
    """SGLang's `Req`, as far as it is read. `accepted`: of the last step, which `output_ids` may
    not have yet."""

    rid: str
    origin_input_ids: list[int]
    output_ids: array = field(default_factory=lambda: array("q"))
    accepted: list[int] = field(default_factory=list)
    kept: int = 0  # draft tokens that were accepted, of all steps
    asked: int = 0  # steps

    @property
    def tokens(self) -> list[int]:
        return [*self.origin_input_ids, *self.output_ids, *self.accepted]


def server_args(num_tokens: int = 5, *, overlap: bool = False, depth: int = 18) -> Any:
    return SimpleNamespace(
        speculative_num_draft_tokens=num_tokens,
        speculative_ngram_max_trie_depth=depth,
        disable_overlap_schedule=not overlap,
        tokenizer_path=None,
        revision=None,
        trust_remote_code=False,
    )


def target_worker() -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model_path="a model", vocab_size=VOCABULARY, context_len=CONTEXT
        )
    )


def step(worker: Any, requests: list[Request]) -> None:
    """One verification of a batch: chains are kept as far as the rule agrees, then the rule's token
    is added."""
    if not worker.enable_overlap:
        for request in requests:
            request.output_ids.extend(request.accepted)
            request.accepted = []
    tokens, sees = worker._prepare_draft_tokens(SimpleNamespace(reqs=requests))
    number = worker.draft_token_num
    assert tokens.dtype == sees.dtype == np.int64
    assert sees.reshape(len(requests), number, number).tolist() == [
        np.tri(number).astype(int).tolist()
    ] * len(requests)
    for request, row in zip(requests, tokens.reshape(len(requests), number).tolist(), strict=True):
        text = request.tokens
        assert row[0] == text[-1], "the root is the text's last token"
        emitted = [rule(text)]
        for token in row[1:]:
            if token != emitted[-1]:
                break
            emitted.append(rule([*text, *emitted]))
        request.output_ids.extend(request.accepted)
        request.accepted = emitted
        request.kept += len(emitted) - 1
        request.asked += 1
