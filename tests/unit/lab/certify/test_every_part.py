"""A small certificate of every drafter of the table, of every lossless verifier, of stop rules,
heads and grammars.

Each is one decoder as a user could ask for it. What a drafter reads (hidden states), how it drafts
(trees, another vocabulary) or what ends a row (a grammar) must not keep a certificate from being
made, nor from being refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.build import Options
from outrider.drafters import DRAFTERS
from outrider.errors import ConfigError, RequestError
from outrider.lab.certify.certify import CertifyPlan, certify, identity, tokens_of
from outrider.lab.certify.certify_result import CertifyResult
from outrider.lab.certify.subject import Subject
from outrider.lab.journal import Journal
from outrider.lab.workload.types import Workload, WorkloadRequest
from outrider.models.lm import PassLimits
from outrider.sampling.params import SamplingParams
from outrider.sampling.structured import StructuredOutputsParams
from outrider.verifiers import VERIFIERS
from tests.heads import ACCEPTANCE, HEADS
from tests.helpers import byte_tokenizer, disturbed, save_checkpoint, tiny_llama

pytestmark = pytest.mark.usefixtures("shorter_texts")
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TEXTS = ("to be or not to be or", "1, 2, 1, 2, 1, 2", "xyxyxyxyx")
PLAN = CertifyPlan(samples=400, sampling=SamplingParams(max_tokens=12))
AT = "{root}"  # in a setting: the folder with the models and heads of this run
LOSSLESS = [name for name in VERIFIERS.names() if VERIFIERS.load(name).lossless]
OF_TREES = [name for name in LOSSLESS if VERIFIERS.load(name).shape == "tree"]

# What a drafter cannot be built without, and what makes it draft something different.
REQUIRED: dict[str, dict[str, Any]] = {
    "retrieval": {"corpus": __file__, "min_match": 1}, "early-exit": {"exit_layer": 1},
    **{name: {"head": f"{AT}/{name}"} for name in HEADS},
}  # fmt: skip
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("composite", {"parts": "suffix,eagle3", "options": f"eagle3.head={AT}/eagle3"}),
    ("composite", {"parts": "medusa,ngram", "mode": "best", "options": f"medusa.head={AT}/medusa"}),
    ("draft-model", {"tree": "best-first"}),
    ("draft-model", {"tree": "parallel:2"}),
    ("draft-model", {"window": 8}),
    ("draft-model", {"stop": "entropy", "stop_below": 0.5, "entropy_weight": 0.05}),
    ("draft-model", {"stop": "product", "stop_below": 0.1}),
    (
        "draft-model",
        {"stop": "acceptance", "stop_below": 0.3, "acceptance_head": f"{AT}/acceptance"},
    ),
    ("block", {"stop": "confidence", "stop_below": 0.2}),
    ("block", {"tree": "2x2x1"}),
    ("eagle3", {"tree": "best-first", "min_gain": 0.0}),
    ("medusa", {"tree": "medusa"}),
    ("universal", {"method": "reencode"}),
    ("suffix", {"tree": True}),
]
ELSEWHERE = ("remote",)  # needs a service: tests/contract/test_exact_distribution_remote.py
IDLE = ("none", "prediction")  # draft nothing for a workload
EVERY: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in DRAFTERS.names() if name not in (*IDLE, *ELSEWHERE)), *VARIANTS
]  # fmt: skip
# One of each kind by day, without settings of their own: a head, a mixture, a look-up; and a draft
# model, another tokenizer's, the target's own layers, which are slow.
QUICK = ("eagle3", "composite", "retrieval")
BY_DAY = (*QUICK, "draft-model", "universal", "early-exit")
# Further statistics of what is certified without settings, and whose texts
# tests/contract/test_drafters.py holds to plain ones.
AT_NIGHT = pytest.mark.nightly
Open = Callable[..., Subject]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft and one head of every kind."""
    folder = tmp_path_factory.mktemp("every")
    target = tiny_llama(257, seed=3, sharpness=2.0, **SIZES)
    for name, model in (("target", target), ("draft", disturbed(target, 0.3))):
        save_checkpoint(folder / name, model, byte_tokenizer())
    for name, write in {**HEADS, **ACCEPTANCE}.items():
        write(target, folder / name)
    return folder


@pytest.fixture
def open_subject(root: Path) -> Open:
    def opened(drafter: str, settings: dict[str, Any], verifier: str = "auto") -> Subject:
        torch.set_num_threads(1)
        chosen = {**(REQUIRED.get(drafter) or {}), **settings}
        chosen = {
            name: value.replace(AT, str(root)) if isinstance(value, str) else value
            for name, value in chosen.items()
        }
        kind = DRAFTERS.load(drafter)
        wants = kind.requirements(kind.Settings(**chosen)).draft
        subject = Subject.open(
            Options(
                target=str(root / "target"),
                drafter=drafter,
                drafter_options=chosen,
                draft=str(root / "draft") if wants else None,
                verifier=verifier,
                dtype="float32",
            )
        )
        for loaded in filter(None, (subject.built.target, subject.built.draft)):
            # whole batches in one pass: quick, and fp32 leaves no near-ties here
            loaded.lm.limits = PassLimits()
        return subject

    return opened


def run(
    subject: Subject, plan: CertifyPlan = PLAN, texts: tuple[str, ...] = TEXTS
) -> CertifyResult:
    workload = Workload(
        "texts", tuple(WorkloadRequest(str(n), text) for n, text in enumerate(texts))
    )
    return certify(subject, workload, tokens_of(subject, workload, plan), plan, Journal())


def check(result: CertifyResult) -> None:
    """Lossless, and not because nothing was drafted."""
    assert result.verdict == "lossless", result.reasons
    origins = result.sampled_distribution.origins
    assert origins["accepted"]
    assert origins.get("correction") or origins.get("bonus")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "settings"),
    [
        pytest.param(
            name,
            settings,
            marks=AT_NIGHT
            if settings or name not in BY_DAY
            else ()
            if name in QUICK
            else pytest.mark.slow,
        )
        for name, settings in EVERY
    ],
    ids=lambda value: (
        value
        if isinstance(value, str)
        else ",".join(f"{k}={v}" for k, v in value.items()) or "plain"
    ),
)
def test_every_drafter_gets_a_certificate(
    open_subject: Open, drafter: str, settings: dict[str, Any]
) -> None:
    check(run(open_subject(drafter, settings)))


@pytest.mark.parametrize("drafter", IDLE)
def test_where_nothing_is_drafted_there_is_nothing_to_certify(
    open_subject: Open, drafter: str
) -> None:
    """Catches a certificate that would say "lossless" of a drafter that never drafted."""
    with pytest.raises(ConfigError, match=f"drafter '{drafter}'"):
        open_subject(drafter, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "verifier"),
    [pytest.param("chain", name, marks=AT_NIGHT if name in OF_TREES else ()) for name in LOSSLESS]
    + [("2x2", name) for name in OF_TREES],
)
def test_every_lossless_verifier_gets_one_on_chains_and_trees(
    open_subject: Open, verifier: str, shape: str
) -> None:
    check(run(open_subject("draft-model", {"tree": shape}, verifier)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter",
    [
        "composite",
        "universal",
        "ngram-cache",
        *(
            pytest.param(name, marks=AT_NIGHT)
            for name in ("eagle3", "block", "medusa", "retrieval")
        ),
    ],
)
def test_shared_noise_gives_one_text_whoever_drafts(open_subject: Open, drafter: str) -> None:
    result = run(open_subject(drafter, {}, "gumbel"))
    check(result)
    assert result.invariance.status == "passed"


@pytest.mark.slow
@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    "drafter",
    [
        "eagle3",
        pytest.param("universal", marks=pytest.mark.slow),
        *(pytest.param(name, marks=AT_NIGHT) for name in ("block", "medusa")),
    ],
)
def test_a_faulty_verifier_gets_none_whoever_drafts(open_subject: Open, drafter: str) -> None:
    """Found among this drafter's own drafts."""
    result = run(
        open_subject(drafter, {}, "resamples"), CertifyPlan(samples=1500, sampling=PLAN.sampling)
    )
    assert result.verdict == "not lossless"
    assert result.sampled_distribution.status == "failed"


# ------------------------------------------------ grammars


def bound(pattern: str, samples: int = PLAN.samples) -> CertifyPlan:
    """Answers match this."""
    form = StructuredOutputsParams(regex=pattern)
    return CertifyPlan(
        samples=samples, sampling=SamplingParams(max_tokens=12, structured_outputs=form)
    )


LETTERS = "([a-d][a-d ])+"


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter",
    [
        "draft-model",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("composite", "universal")),
        *(pytest.param(name, marks=AT_NIGHT) for name in ("ngram", "eagle3")),
    ],
)
def test_answers_under_a_grammar_get_a_certificate(open_subject: Open, drafter: str) -> None:
    """Laws are those of the constrained target; a row that ends because the grammar is over ends
    alike on all ways."""
    subject = open_subject(drafter, {})
    plan = bound(LETTERS)
    result = run(subject, plan)
    check(result)
    assert result.sampling["structured_outputs"]["regex"] == LETTERS
    answer = subject.texts(
        subject.speculative, [[40, 41]], [replace(plan.sampling, max_tokens=9, ignore_eos=True)]
    )[0]
    assert set(subject.built.target.tokenizer.decode(answer)) <= set("abcd ")


@pytest.mark.slow
@pytest.mark.usefixtures("broken")
def test_a_faulty_verifier_gets_none_under_a_grammar(open_subject: Open) -> None:
    """On the two letters that a grammar leaves there is little to see, but enough."""
    result = run(open_subject("draft-model", {}, "resamples"), bound(LETTERS, 1000))
    assert result.verdict == "not lossless"
    assert result.sampled_distribution.status == "failed"


def test_a_wrong_grammar_is_refused_at_once(open_subject: Open) -> None:
    with pytest.raises(RequestError, match="regex is not usable"):
        run(open_subject("ngram", {}), bound("(a"))


def test_another_grammar_is_another_run(open_subject: Open) -> None:
    """A journal of free texts must not be gone on with."""
    subject = open_subject("ngram", {})
    found = [
        str(identity(subject, [[1, 2]], plan)) for plan in (PLAN, bound("yes|no"), bound("yes"))
    ]
    assert len(set(found)) == 3
