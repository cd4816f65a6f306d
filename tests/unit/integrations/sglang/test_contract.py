"""SGLang's own source, where it lies somewhere (OUTRIDER_SGLANG_SOURCE, or installed): names and
arguments that we rely on.

Its files are read, not imported: an import needs its kernels. The function that prepares drafts is
run for itself, with ours.
"""

from __future__ import annotations

import ast
import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.integrations.sglang.lookups import Lookups
from outrider.integrations.sglang.worker import ARGUMENTS, TABLE, WORKER
from outrider.integrations.vllm.drafting import BatchDrafter
from outrider.integrations.vllm.lookups import LookupPlan
from outrider.integrations.vllm.options import Chosen
from outrider.integrations.vllm.target import TextOnly
from tests.unit.integrations.sglang.stand_in import CONTEXT, VOCABULARY, Request, rule

NUMBER = 5


def _folder() -> Path | None:
    named = os.environ.get("OUTRIDER_SGLANG_SOURCE")
    if named is not None:
        return Path(named) / "sglang"
    found = find_spec("sglang")
    return Path(found.origin).parent if found is not None and found.origin else None


FOLDER = _folder()
pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="no SGLang here (OUTRIDER_SGLANG_SOURCE: the folder with its package)"
)


def parsed(name: str) -> ast.Module:
    assert FOLDER is not None
    return ast.parse((FOLDER / "srt" / name).read_text(encoding="utf-8"))


def class_in(module: ast.Module, name: str) -> ast.ClassDef:
    return next(
        node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name
    )


def methods(owner: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in owner.body if isinstance(node, ast.FunctionDef)}


def test_what_we_call_and_replace_has_these_arguments() -> None:
    files = {WORKER: "speculative/ngram_worker.py", TABLE: "speculative/cpp_ngram/ngram_corpus.py"}
    for (owner, method), arguments in ARGUMENTS.items():
        found = methods(class_in(parsed(files[owner]), owner))[method]
        assert tuple(one.arg for one in found.args.args) == arguments, (owner, method)


def test_we_answer_every_call_to_the_table() -> None:
    """By the worker, and by SGLang's manager of corpora through it."""
    tree = parsed("speculative/ngram_worker.py")
    called = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "ngram_corpus"
    }
    assert called
    assert [name for name in called if not hasattr(Lookups, name)] == []


def test_the_worker_makes_its_table_by_a_name_of_its_module_and_with_keywords() -> None:
    made = [
        node
        for node in ast.walk(
            methods(class_in(parsed("speculative/ngram_worker.py"), WORKER))["__init__"]
        )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == TABLE
    ]
    assert len(made) == 1
    assert made[0].args == []
    assert "draft_token_num" in [keyword.arg for keyword in made[0].keywords]


def test_algorithms_can_be_registered() -> None:
    register = methods(class_in(parsed("speculative/spec_info.py"), "SpeculativeAlgorithm"))[
        "register"
    ]
    assert {one.arg for one in register.args.kwonlyargs} == {
        "supports_overlap",
        "validate_server_args",
        "spec_class",
    }
    base = methods(class_in(parsed("speculative/spec_registry.py"), "CustomSpecAlgo"))
    assert {"is_ngram", "has_draft_kv", "handle_server_args", "create_worker"} <= set(base)
    assert "__getattr__" not in base, "ours answers what this class lacks"


@pytest.mark.parametrize("overlap", [False, True])
def test_its_preparation_of_drafts_works_with_ours(overlap: bool) -> None:
    """The code of SGLang that collects texts, in both schedules: drafts are kept, and every text is
    the target's."""
    code = methods(class_in(parsed("speculative/ngram_worker.py"), WORKER))
    wanted = [code["_prepare_draft_tokens"], code["_efficient_concat_last_n"]]
    for function in wanted:
        function.returns = None
        for argument in function.args.args:
            argument.annotation = None
    names: dict[str, Any] = {}
    exec(
        compile(ast.Module(body=list(wanted), type_ignores=[]), "ngram_worker", "exec"),
        {"np": np, "torch": torch},
        names,
    )
    target = TextOnly("m", VOCABULARY, CONTEXT, "m")
    drafting = BatchDrafter(
        LookupPlan.choose(Chosen("suffix", {})).build(target, NUMBER - 1), "suffix", VOCABULARY
    )
    lookups = Lookups(drafting, NUMBER, CONTEXT)
    worker = SimpleNamespace(
        draft_token_num=NUMBER, max_trie_depth=18, enable_overlap=overlap, ngram_corpus=lookups
    )
    worker._efficient_concat_last_n = lambda *given: names["_efficient_concat_last_n"](
        worker, *given
    )
    prompt = [(7 * index) % VOCABULARY for index in range(20)]
    requests = [Request(f"r{n}", [*prompt, n], accepted=[rule([*prompt, n])]) for n in range(3)]
    for _ in range(25):
        if not overlap:
            for one in requests:
                one.output_ids.extend(one.accepted)
                one.accepted = []
        padded = [one.accepted + [0] * (NUMBER - len(one.accepted)) for one in requests]
        spec_info = SimpleNamespace(
            accept_tokens=torch.tensor(padded, dtype=torch.int32).flatten(),
            accept_lens=torch.tensor([len(one.accepted) for one in requests]),
        )
        batch = SimpleNamespace(
            reqs=requests, grammar_needs_sync=lambda: False, spec_info=spec_info
        )
        lookups.see(requests)
        tokens, _ = names["_prepare_draft_tokens"](worker, batch)
        for one, row in zip(requests, tokens.reshape(-1, NUMBER).tolist(), strict=True):
            text = one.tokens
            assert row[0] == text[-1]
            kept = [rule(text)]
            for token in row[1:]:
                if token != kept[-1]:
                    break
                kept.append(rule([*text, *kept]))
            one.output_ids.extend(one.accepted)
            one.accepted = kept
            one.kept = one.kept + len(kept) - 1
    assert sum(one.kept for one in requests) > 20
