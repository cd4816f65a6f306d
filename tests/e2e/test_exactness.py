"""Greedy text with a drafter is greedy text without, to the last token: on real trained weights, in
bf16 and fp32, alone and in a batch.

Random weights would not do: only trained ones have the near-ties and the value ranges that make one
bit of a sum matter. Three models where they are at hand: a 14M-parameter Llama with its draft, a
story teller of 260k, and the embedded demo pair. The drafters include a stranger's random weights
and an oracle that errs on purpose, so that every number of accepted tokens occurs. A last test
compares plain decoding itself with transformers' own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from outrider.build import Built, Options, build
from outrider.decode import Decoder
from outrider.demo import demo_paths
from outrider.draft_length import FixedLength
from outrider.drafters.base import Drafter
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.parts import choose_parts
from outrider.rows import Row, Rows
from outrider.runtime import library
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from tests.helpers import make_row, run_to_end
from tools.demo_models.problems import problems

QUESTIONS = (
    "Question: A baker sells 12 loaves in the morning and twice as many in the afternoon. How many?\nAnswer:",
    "def fibonacci(n):\n",
    "Question: What is 17 + 25 * 3?\nAnswer: 17 + 25 * 3 = 17 + ",
)
STORIES = ("Once upon a time", "Tom and Lily went to the park. Tom said", "The little red bird")
WORD_PROBLEMS = tuple(
    p.prompt for p in islice(problems(7, held_out=True, weights={4: 1.0, 5: 1.0}), 3)
)
NUM_TOKENS = 200
WITHOUT_END = SamplingParams(max_tokens=NUM_TOKENS)


@dataclass
class Subject:
    """One target in one dtype with the drafts it can have, and its plain texts."""

    built: dict[str, Built]  # draft's name -> target and draft; the targets are the same model
    prompts: list[list[int]]
    plain: list[list[int]] = field(default_factory=list)

    def decoder(self, drafter: str, draft: str, gamma: int) -> Decoder:
        built = self.built[draft]
        parts = choose_parts(
            "none" if drafter == "oracle" else drafter, {}, "auto", {}, gamma, lossy=False
        )
        made = (
            OracleThatErrs(self)
            if drafter == "oracle"
            else parts.make_drafter(built.target, built.draft)
        )
        return Decoder(built.target.lm, made, parts.make_verifier(), FixedLength(gamma))

    def texts(self, drafter: str, draft: str, gamma: int, *, together: bool) -> list[list[int]]:
        decoder = self.decoder(drafter, draft, gamma)
        rows = [
            make_row(prompt, WITHOUT_END, seed=1, number=n) for n, prompt in enumerate(self.prompts)
        ]
        if not together:
            return [self._run(decoder, [row]) for row in rows]
        self._run(decoder, rows)
        return [row.output for row in rows]

    @staticmethod
    def _run(decoder: Decoder, rows: list[Row]) -> list[int]:
        for row in rows:
            decoder.add(row)
        return run_to_end(decoder)[0].output


class OracleThatErrs(Drafter):
    """Knows the plain text and proposes it, but for a wrong token at a position that wanders from
    step to step."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        width = max(gamma)
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        for index, row in enumerate(rows):
            done = len(row.output)
            known = self._subject.plain[row.request][done : done + width]
            tokens[index, : len(known)] = torch.tensor(known)
            if (wrong := done * 7 % (width + 2)) < width:
                tokens[index, wrong] = (tokens[index, wrong] + 1 + done) % rows.vocab_size
        return Draft(tokens, torch.tensor(gamma))


def make_stranger(target: Path, folder: Path) -> Path:
    """A random draft model with the target's tokenizer."""
    config = AutoConfig.from_pretrained(target)
    config.num_hidden_layers = 1
    config.layer_types = None
    with torch.random.fork_rng():
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    return folder


def folders(name: str, request: pytest.FixtureRequest) -> tuple[Path, Path | None]:
    """Target and trained draft of a subject; skips where they are not at hand."""
    if name == "stories":
        return request.getfixturevalue("stories"), None
    if name == "pair":
        return request.getfixturevalue("pair")
    try:
        paths = demo_paths()
    except OutriderError as error:
        pytest.skip(str(error))
    return Path(paths.target), Path(paths.draft)


# what CPUs run on comes first
RUNTIMES = ("eager",) if library.why_missing() else ("native", "eager")
QUICK = tuple(
    (name, dtype, RUNTIMES[0])
    for name, dtype in (("stories", "float32"), ("pair", "bfloat16"), ("demo", "bfloat16"))
)
EVERY = [
    (name, dtype, on)
    for on in RUNTIMES
    for name in ("stories", "pair", "demo")
    for dtype in ("float32", "bfloat16")
]
Mark = pytest.MarkDecorator | tuple[()]
NIGHTLY = pytest.mark.nightly


def cases(*ways: tuple[tuple[Any, ...], Mark, Mark]) -> list[Any]:
    """Every subject with every way to decode; each way with its mark for the quick subjects and its
    mark for the others.

    The smallest subject has every runtime and number format by day, the larger ones what they are
    run in.
    """
    return [
        pytest.param(
            subject,
            *way,
            id="-".join(map(str, (*subject, *way))),
            marks=quick if subject in QUICK else others if subject[0] == "stories" else NIGHTLY,
        )
        for subject in EVERY
        for way, quick, others in ways
    ]


every_subject = pytest.mark.parametrize("subject", cases(((), (), pytest.mark.slow)), indirect=True)


@pytest.fixture(scope="module")
def subjects() -> dict[tuple[str, str, str], Subject]:
    """All that tests here have asked for: pytest takes turns among the parameters of a fixture, and
    building takes seconds."""
    return {}


@pytest.fixture
def subject(
    request: pytest.FixtureRequest,
    subjects: dict[tuple[str, str, str], Subject],
    tmp_path_factory: pytest.TempPathFactory,
) -> Subject:
    torch.set_num_threads(1)
    if request.param not in subjects:
        subjects[request.param] = make_subject(
            *request.param, request, tmp_path_factory.mktemp("stranger")
        )
    return subjects[request.param]


def make_subject(
    name: str, dtype: str, runtime: str, request: pytest.FixtureRequest, scratch: Path
) -> Subject:
    target, draft = folders(name, request)
    drafts = {"stranger": make_stranger(target, scratch)}
    drafts |= {} if draft is None else {"trained": draft}
    built = {
        key: build(
            Options(
                target=str(target),
                drafter="draft-model",
                draft=str(path),
                dtype=dtype,
                runtime=runtime,
                threads=1,
            )
        )
        for key, path in drafts.items()
    }
    tokenizer = built["stranger"].target.tokenizer
    texts = {"stories": STORIES, "pair": QUESTIONS, "demo": WORD_PROBLEMS}[name]
    made = Subject(built, [tokenizer(text)["input_ids"] for text in texts])
    made.plain = made.texts("none", "stranger", 1, together=False)
    return made


def same_texts(subject: Subject, drafter: str, draft: str, gamma: int, *, together: bool) -> None:
    found = subject.texts(drafter, draft, gamma, together=together)
    for number, (ours, plain) in enumerate(zip(found, subject.plain, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=True)) if a != b), None)
        assert at is None, (
            f"{drafter} ({draft}, {gamma} tokens), prompt {number}: differs at token {at}"
        )


@pytest.mark.slow
@every_subject
def test_plain_texts_are_long(subject: Subject) -> None:
    """Catches a comparison of nothing with nothing."""
    assert [len(text) for text in subject.plain] == [NUM_TOKENS] * 3
    assert all(len(set(text)) > 10 for text in subject.plain)


@every_subject
def test_plain_in_a_batch(subject: Subject) -> None:
    """Catches bits that depend on how many rows share a pass."""
    same_texts(subject, "none", "stranger", 1, together=True)


# By day every length and both companies with three subjects, the widest passes with all of stories.
WIDTHS = cases(
    ((5, False), (), pytest.mark.nightly),
    ((8, True), (), pytest.mark.slow),
    *((width, pytest.mark.slow, pytest.mark.nightly) for width in ((1, True), (3, False))),
    *(
        (width, pytest.mark.nightly, pytest.mark.nightly)
        for width in ((1, False), (3, True), (5, True), (8, False))
    ),
)


@pytest.mark.parametrize(("subject", "gamma", "together"), WIDTHS, indirect=["subject"])
def test_draft_model(subject: Subject, gamma: int, together: bool) -> None:
    """Catches bits that depend on the width of a pass, over the widths a drafter makes."""
    draft = "trained" if "trained" in subject.built else "stranger"
    same_texts(subject, "draft-model", draft, gamma, together=together)


# By hand what is together; a stranger drafts for the stories and rows are alone in the test above.
OTHERS = cases(
    *((way, (), pytest.mark.nightly) for way in (("ngram", 5, True), ("oracle", 8, True))),
    (("oracle", 3, False), pytest.mark.slow, pytest.mark.slow),
    (("draft-model", 4, True), pytest.mark.slow, pytest.mark.nightly),
)


@pytest.mark.parametrize(("subject", "drafter", "gamma", "together"), OTHERS, indirect=["subject"])
def test_other_drafters(subject: Subject, drafter: str, gamma: int, together: bool) -> None:
    """Catches a rejected token that leaves something behind: strangers are rejected always, the
    oracle at every position."""
    same_texts(subject, drafter, "stranger", gamma, together=together)


@every_subject
def test_plain_is_transformers(subject: Subject) -> None:
    """Catches an engine that agrees with itself and with nobody else.

    Teacher-forced, so that one near-tie does not end the comparison: each of our tokens must be the
    largest logit of transformers' own forward, or within rounding of it.
    """
    built = subject.built["stranger"]
    lm = built.target.lm
    reference = AutoModelForCausalLM.from_pretrained(built.target.name, dtype=lm.dtype).eval()
    tolerance = 1e-3 if lm.dtype == torch.float32 else 0.25
    exact = 0
    for prompt, output in zip(subject.prompts, subject.plain, strict=True):
        with torch.inference_mode():
            logits = (
                reference(input_ids=torch.tensor([prompt + output]))
                .logits[0, len(prompt) - 1 : -1]
                .float()
            )
        ours = torch.tensor(output)
        gap = logits.max(dim=-1).values - logits.gather(1, ours[:, None])[:, 0]
        assert gap.max() <= tolerance
        exact += int((logits.argmax(dim=-1) == ours).sum())
    assert exact >= 0.97 * NUM_TOKENS * len(subject.prompts)


@pytest.mark.slow
@pytest.mark.skipif(library.why_missing() is not None, reason=str(library.why_missing()))
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.nightly)])
def test_on_the_native_runtime(dtype: str) -> None:
    """The embedded pair: catches passes whose bits depend on their company, and a drafting loop
    that leaves something behind."""
    threads = torch.get_num_threads()
    options = {"dtype": dtype, "runtime": "native", "threads": 2}
    prompts = list(WORD_PROBLEMS)
    demo = demo_paths()
    plain = LLM(demo.target, drafter="none", **options).generate(prompts, WITHOUT_END)
    llm = LLM(demo.target, draft=demo.draft, num_draft_tokens=3, **options)
    assert llm.config["runtime"] == "native"
    together = llm.generate(prompts, WITHOUT_END)
    alone = [llm.generate(prompt, WITHOUT_END)[0] for prompt in prompts]
    for done in (together, alone):
        assert [c.token_ids for c in done] == [c.token_ids for c in plain]
        assert sum(c.stats.accepted for c in done) > 0
    # distributions and verdicts by kernels, where those serve
    sampled = replace(WITHOUT_END, temperature=0.8, top_p=0.9, seed=7)
    for verifier in ("block", "gumbel"):
        llm = LLM(demo.target, draft=demo.draft, num_draft_tokens=3, verifier=verifier, **options)
        texts = [llm.generate(prompt, sampled)[0].token_ids for prompt in prompts]
        assert [c.token_ids for c in llm.generate(prompts, sampled)] == texts
    alone = LLM(demo.target, drafter="none", verifier="gumbel", **options)
    assert [c.token_ids for c in alone.generate(prompts, sampled)] == texts
    torch.set_num_threads(threads)
