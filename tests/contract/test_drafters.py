"""One suite for every drafter: each registered one gets all of these tests, under every verifier.

A drafter may guess badly but must not show: greedy text is plain decoding's text, a step leaves
nothing behind, a row does not notice its neighbours, and the counters add up. Drafters that take a
model are tried with five: a copy of the target (everything accepted), a slightly disturbed one, a
random model of another shape (nearly nothing accepted), the disturbed one with a shorter
context and a wider, padded vocabulary, and the disturbed one with a mask token, which drafts in one
pass.

Pairs of drafter and verifier: the thorough drafters (none, a look-up, a draft model) meet every
lossless verifier, every other drafter the default one, or shared noise where it learns. Under
shared noise every drafter has a test of its own. Each meets lengths that change, and the thorough
ones also drafts of one, a few and many tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from outrider.build import Built, Options, assemble, choose, load_models
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters import DRAFTERS
from outrider.drafters.base import Drafter
from outrider.models.derived.quantised_linear import QuantisedLinear
from outrider.models.heads.acceptance import AcceptanceConfig
from outrider.models.linear.pack import PackedLinear
from outrider.models.lm import LM
from outrider.options import Needs
from outrider.parts import choose_parts
from outrider.rows import Row, Rows
from outrider.runtime import library
from outrider.sampling.params import SamplingParams
from outrider.settings import parse_settings
from outrider.types import Draft
from outrider.verifiers import VERIFIERS
from tests.draft_service import FakeDraftService, Repeating
from tests.heads import ACCEPTANCE, BLOCKS, HEADS, MASKED
from tests.helpers import (
    byte_tokenizer,
    disturbed,
    make_row,
    run_to_end,
    save_checkpoint,
    tiny_llama,
    widened,
)

DRAFTS = ("copy", "near", "stranger", "narrow", "masked")
# tried with every draft and every verifier; their relatives with the telling ones
THOROUGH = ("none", "draft-model", "ngram")
TELLING_DRAFT = "near"  # accepts and rejects: with this one every verifier is tried
# Settings without which a drafter refuses to be built: given to it in every case.
REQUIRED: dict[str, dict[str, Any]] = {
    "retrieval": {"corpus": __file__},  # holds the prompts below
}


# Settings that change what is drafted; every drafter is also tried without any. HEADS_AT stands for
# the folder with the heads.
HEADS_AT = "{heads}"
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "block": [
        {"tree": "best-first", "min_gain": 0.0},
        {"head": f"{HEADS_AT}/jetspec", "tree": "2x2x1"},
        {"stop": "confidence", "stop_below": 0.2},
        {"head": f"{HEADS_AT}/dflash2"},
        {"head": f"{HEADS_AT}/rnn", "tree": "2x2x1"},
    ],
    "composite": [
        {"parts": "ngram,suffix"},
        {"parts": "ngram,draft-model", "mode": "best"},
        {"parts": "quantised,recycling", "options": "quantised.bits=8"},
        {"parts": "suffix,eagle3", "options": f"eagle3.head={HEADS_AT}/eagle3"},
        {"parts": "block,ngram", "options": f"block.head={HEADS_AT}/block"},
        {"parts": "medusa,ngram", "mode": "best", "options": f"medusa.head={HEADS_AT}/medusa"},
        {
            "parts": "suffix,eagle3",
            "options": f"eagle3.head={HEADS_AT}/eagle3;eagle3.tree=best-first;eagle3.min_gain=0",
        },
        {
            "parts": "medusa,ngram",
            "options": f"medusa.head={HEADS_AT}/medusa;medusa.tree=2x2x1",
        },
        {"parts": "ngram,draft-model", "mode": "best", "options": "draft-model.tree=parallel:2"},
        {"parts": "ngram,prediction"},
        {"parts": "draft-model,prediction", "mode": "best"},
    ],
    "draft-model": [
        {"tree": "2x2x1"},
        {"tree": "best-first"},
        {"tree": "sequoia"},
        {"tree": "parallel:2"},
        {"stop": "entropy", "stop_below": 0.2},
        {"stop": "product", "stop_below": 0.1},
        {"stop": "acceptance", "stop_below": 0.3, "acceptance_head": f"{HEADS_AT}/acceptance"},
        {"window": 16},
        {"tree": "best-first", "window": 16},
    ],
    "eagle": [{"tree": "best-first", "min_gain": 0.0}],
    "eagle3": [
        {"tree": "2x2x1"},
        {"tree": "best-first", "min_gain": 0.0},
        {"tree": "parallel:2"},
        {"stop": "product", "stop_below": 0.1},
        {"head": f"{HEADS_AT}/peagle"},
        {"head": f"{HEADS_AT}/peagle", "tree": "best-first", "min_gain": 0.0},
        {"window": 16},
    ],
    "medusa": [
        {"tree": "medusa"},
        {"tree": "best-first"},
        {"tree": "2x2x1"},
        {"tree": "parallel:2"},
        {"stop": "product", "stop_below": 0.01},
    ],
    "mtp": [
        {"tree": "2x2x1"},
        {"tree": "best-first", "min_gain": 0.0},
        {"stop": "product", "stop_below": 0.1},
        {"window": 16},
    ],
    "lookahead": [{"ngram": 4, "window": 2, "guesses": 1}],
    "ngram-cache": [{"branches": 1}],
    "recycling": [{"top_k": 1}],
    "retrieval": [{"min_match": 1, "branches": 1}],
    "quantised": [{"bits": 8}, {"group_size": 64, "quantise_head": False}],
    "early-exit": [{"exit_layer": 1}, {"skip_layers": "0"}],
    "ngram": [{"tree": True}, {"min_ngram": 2, "recency": 0.0, "min_share": 0.0}],
    "prediction": [{"min_match": 3, "near": 0}],
    "suffix": [{"tree": True}, {"max_depth": 6, "alpha": 1.0, "discount": 0.0, "max_tokens": 50}],
    "universal": [{"method": "reencode"}],
}
# those of a draft model that are tried with a mask token, too
MASKED_VARIANTS = ({"tree": "2x2x1"}, {"tree": "best-first"}, {"window": 16})
Case = tuple[str, str | None, int]  # drafter, draft model, which variant (0: no settings)


def parsed(name: str, variant: int) -> tuple[type[Drafter], Any]:
    """The class and its settings."""
    drafter = DRAFTERS.load(name)
    chosen = VARIANTS[name][variant - 1] if variant else {}
    return drafter, parse_settings(drafter.Settings, {**REQUIRED.get(name, {}), **chosen}, name)


def drafts_for(name: str, variant: int) -> tuple[str | None, ...]:
    """Draft models to try: all of them without settings, the slightly disturbed one with."""
    drafter, settings = parsed(name, variant)
    if not drafter.requirements(settings).draft:
        return (None,)
    if not variant:
        return DRAFTS if name in THOROUGH else ("near", "narrow")
    return ("near", "masked") if VARIANTS[name][variant - 1] in MASKED_VARIANTS else ("near",)


CASES: list[Case] = [
    (name, draft, variant)
    for name in DRAFTERS.names()
    for variant in range(1 + len(VARIANTS.get(name, [])))
    for draft in (drafts_for(name, variant))
]
LOSSLESS = [name for name in VERIFIERS.names() if VERIFIERS.load(name).lossless]
PROMPTS = ("to be or not to be or", "x", "1, 2, 3, 1, 2, 3, 1, 2, 3, 1")
TEXT_OF_ROWS = 40  # tokens
ACCEPTANCE_HIDDEN = AcceptanceConfig().hidden_size  # layers of this width gain nothing from threads


class ChangingLength(FixedLength):
    """Draft lengths that change from step to step, and in the last step of each turn from row to
    row."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(max(lengths))
        self._lengths = lengths
        self._step = -1

    def choose(self, rows: Rows) -> list[int]:
        self._step += 1
        lengths = self._lengths
        turn = self._step % (len(self._lengths) + 1)
        ragged = [lengths[(self._step + index) % len(lengths)] for index in range(len(rows))]
        wanted = ragged if turn == len(lengths) else [lengths[turn]] * len(rows)
        return [row.clamp_draft(length) for row, length in zip(rows, wanted, strict=True)]


@dataclass
class Bench:
    """The models, loaded twice: once to work with, once to start afresh beside them."""

    root: Path
    device: str = "cpu"
    runtime: str = "eager"
    built: dict[tuple[str | None, int, bool], Built] = field(default_factory=dict)
    plain_rows: dict[tuple[int, str, str], Row] = field(default_factory=dict)
    # by prompt: what every row carries, whoever drafts
    predictions: list[list[int]] = field(default_factory=list)
    in_use: list[Decoder] = field(default_factory=list)  # of the present test

    def models(self, draft: str | None, copy: int = 0, *, module: bool = False) -> Built:
        """The target and this draft, loaded once per copy; with the target's own module where the
        drafter wants it."""
        if (draft, copy, module) not in self.built:
            name = "draft-model" if draft else "early-exit" if module else "none"
            path = None if draft is None else str(self.root / draft)
            options = Options(
                target=str(self.root / "target"),
                dtype="float32",
                device=self.device,
                runtime=self.runtime,
                threads=1,
                drafter=name,
                draft=path,
            )
            options, parts = choose(options)
            # for its sake the target's tables are kept
            any_head = (DRAFTERS.load("medusa"), str(self.root / "heads" / "medusa"))
            needs = replace(Needs.of(parts), heads=(any_head,))
            self.built[draft, copy, module] = assemble(load_models(options, needs), parts)
        return self.built[draft, copy, module]

    def decoder(
        self, case: Case, verifier: str = "auto", gamma: int | FixedLength = 4, copy: int = 0
    ) -> Decoder:
        """A decoder without rows; `gamma` is a draft length, or what chooses it.

        Decoders of one draft share caches: empty one before using the next."""
        drafter, draft, variant = case
        drafter_class, settings = parsed(drafter, variant)
        built = self.models(draft, copy, module=drafter_class.requirements(settings).module)
        head = {"head": str(self.root / "heads" / drafter)} if drafter_class.requires.head else {}
        control = FixedLength(gamma) if isinstance(gamma, int) else gamma
        parts = choose_parts(
            drafter, {**self.settings_at(case), **head}, verifier, {}, control.gamma, lossy=False
        )
        drafter_made = parts.make_drafter(built.target, built.draft)
        self.in_use.append(Decoder(built.target.lm, drafter_made, parts.make_verifier(), control))
        return self.in_use[-1]

    def settings_at(self, case: Case) -> dict[str, Any]:
        """The settings of a case, with the folders of this run."""
        heads = str(self.root / "heads")
        found = settings_of(case)
        return {
            name: value.replace(HEADS_AT, heads) if isinstance(value, str) else value
            for name, value in found.items()
        }

    def prompt(self, number: int) -> list[int]:
        return self.models(None).target.tokenizer(PROMPTS[number % len(PROMPTS)])["input_ids"]

    def row(self, number: int, params: SamplingParams, *, text: bool = False) -> Row:
        tokenizer = self.models(None).target.tokenizer if text else None
        row = make_row(
            self.prompt(number), params, seed=100 + number, number=number, tokenizer=tokenizer
        )
        row.prediction = self.predictions[number % len(PROMPTS)] if self.predictions else None
        return row

    def predict(self) -> None:
        """The greedy texts with an edit of every kind: a token replaced, two left out, three put
        in, and no end."""
        params = SamplingParams(max_tokens=60)
        texts = [
            self.alone(self.decoder(PLAIN), number, params).output for number in range(len(PROMPTS))
        ]
        self.predictions = [
            [*text[:7], text[7] % 256 + 1, *text[8:15], *text[17:24], 65, 66, 67, *text[24:]]
            for text in texts
        ]

    def alone(
        self, decoder: Decoder, number: int, params: SamplingParams, *, text: bool = False
    ) -> Row:
        """One row, decoded with nobody beside it."""
        decoder.add(self.row(number, params, text=text))
        return run_to_end(decoder)[0]

    def plain(self, number: int, params: SamplingParams, verifier: str = "auto") -> Row:
        """Decoding without a drafter."""
        key = (number, repr(params), verifier)
        if key not in self.plain_rows:
            self.plain_rows[key] = self.alone(
                self.decoder(PLAIN, verifier), number, params, text=True
            )
        return self.plain_rows[key]


def save_models(root: Path) -> None:
    """A target, every draft model, and every head for it."""
    tokenizer = byte_tokenizer()
    target = tiny_llama(257, sharpness=2.0)
    near = disturbed(target, 0.05)
    stranger = tiny_llama(
        257, seed=9, sharpness=3.0, hidden_size=32, num_attention_heads=2, num_key_value_heads=1
    )
    narrow = widened(disturbed(target, 0.05, seed=2), 320)
    narrow.config.max_position_embeddings = 40
    masked = disturbed(target, 0.05)
    masked.config.pard_token = 256
    for name, model in (
        ("target", target),
        ("masked", masked),
        ("copy", target),
        ("near", near),
        ("stranger", stranger),
        ("narrow", narrow),
    ):
        save_checkpoint(root / name, model, tokenizer)
    for name, write in {**HEADS, **ACCEPTANCE, **BLOCKS, **MASKED}.items():
        write(target, root / "heads" / name)


RUNTIMES = (
    ("eager",)
    if library.why_missing()
    else ("native", pytest.param("eager", marks=pytest.mark.nightly))
)


@pytest.fixture(scope="module", params=RUNTIMES)
def bench(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Bench]:
    """The models on the runtime that CPUs have, and by night on torch's modules."""
    root = tmp_path_factory.mktemp("models")
    save_models(root)
    threads = torch.get_num_threads()
    made = Bench(root, runtime=request.param)
    made.predict()
    with FakeDraftService(root, Repeating()) as service, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFT_ENDPOINT", service.address)
        yield made
    torch.set_num_threads(threads)


PLAIN: Case = ("none", None, 0)


def settings_of(case: Case) -> dict[str, Any]:
    return {**REQUIRED.get(case[0], {}), **variant_of(case)}


def variant_of(case: Case) -> dict[str, Any]:
    name, _, variant = case
    return VARIANTS[name][variant - 1] if variant else {}


def name_of(case: Case) -> str:
    name, draft, _ = case
    return "-".join(
        [
            name,
            *([draft] if draft else []),
            *(f"{key}={value}" for key, value in variant_of(case).items()),
        ]
    )


def draws_trees(case: Case) -> bool:
    drafter = DRAFTERS.load(case[0])
    return drafter.requirements(parse_settings(drafter.Settings, settings_of(case), case[0])).trees


def is_thorough(case: Case) -> bool:
    return case[0] in THOROUGH and case[1] in (None, TELLING_DRAFT) and not case[2]


def verifiers_for(case: Case) -> list[str]:
    """Lossless ones that take this drafter's drafts: all of them, or the default one.

    What learns is tried with shared noise, under which its text is one: by another rule hardly
    anything could be asserted."""
    if is_thorough(case):
        return [
            name
            for name in LOSSLESS
            if VERIFIERS.load(name).shape == "tree" or not draws_trees(case)
        ]
    return ["gumbel" if learns(case) else "traversal" if draws_trees(case) else "block"]


def learns(case: Case) -> bool:
    return DRAFTERS.load(case[0]).learns


PAIRS = [(case, verifier) for case in CASES for verifier in verifiers_for(case)]
every_drafter = pytest.mark.parametrize("case", CASES, ids=map(name_of, CASES))
every_pair = pytest.mark.parametrize(
    ("case", "verifier"), PAIRS, ids=[f"{name_of(c)}-{v}" for c, v in PAIRS]
)
GREEDY_PAIRS = [(case, "auto") for case in CASES]
GREEDY_PAIRS += [(case, verifier) for case, verifier in PAIRS if is_thorough(case)]


GREEDY = (
    SamplingParams(max_tokens=TEXT_OF_ROWS),
    SamplingParams(max_tokens=TEXT_OF_ROWS, repetition_penalty=1.2, frequency_penalty=0.5),
    SamplingParams(max_tokens=TEXT_OF_ROWS, presence_penalty=1.0, logit_bias={40: 2.0}),
)


@pytest.mark.parametrize(
    ("case", "verifier"), GREEDY_PAIRS, ids=[f"{name_of(c)}-{v}" for c, v in GREEDY_PAIRS]
)
def test_greedy_text_is_plain_text(bench: Bench, case: Case, verifier: str) -> None:
    """Catches a verifier that accepts too much, a cache that keeps a rejected token, a pass whose
    bits depend on its width."""
    expected = [bench.plain(number, params).output for number, params in enumerate(GREEDY)]
    for gamma in (
        (1, 4, 7) if is_thorough(case) and verifier == "auto" else (ChangingLength(1, 4, 7),)
    ):
        decoder = bench.decoder(case, verifier, gamma)
        for number, params in enumerate(GREEDY):
            decoder.add(bench.row(number, params))
        rows = run_to_end(decoder)
        assert [row.output for row in rows] == expected, f"gamma {gamma}"
        for row in rows:
            check_stats(row)


# a narrow window makes another model of a random draft: tests/unit/drafters/test_window.py has that one
GOOD = [
    case
    for case in CASES
    if (case[1] in ("copy", "near") and "window" not in settings_of(case))
    or case[0] in ("prediction", "none")
]


@pytest.mark.parametrize("case", GOOD, ids=map(name_of, GOOD))
def test_good_drafts_are_used(bench: Bench, case: Case) -> None:
    """Catches the bug no losslessness test sees: drafts that are made, paid for, and rejected for
    no reason."""
    params = SamplingParams(max_tokens=60)
    row = bench.alone(bench.decoder(case), 2, params)
    drafter, draft, _ = case
    if draft == "copy" and not draws_trees(case):
        assert row.stats.accepted == row.stats.tested == row.stats.drafted
        assert row.stats.tau == pytest.approx(5, rel=0.1)
    elif (
        draft in ("copy", "near") and settings_of(case).get("mode") != "best"
    ):  # which may find that drafting does not pay
        assert row.stats.accepted > row.stats.steps / 2
    elif drafter == "prediction":
        assert row.stats.steps < 60 / 2
    elif drafter == "none":
        assert row.stats.drafted == 0
        assert set(row.origins) == {"plain"}


@every_drafter
def test_who_runs_modules_of_torch_says_so(
    bench: Bench, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a target on the native runtime the others leave torch a single thread."""
    decoder = bench.decoder(case)
    here = threading.get_ident()
    ran = False
    propose = decoder.drafter.propose

    def watch(module: nn.Module, _: Any) -> None:
        nonlocal ran
        if (
            isinstance(module, nn.Linear | PackedLinear | QuantisedLinear)
            and threading.get_ident() == here
        ):
            ran |= module.in_features * module.out_features > ACCEPTANCE_HIDDEN**2

    def watched(rows: Rows, gamma: list[int]) -> Draft:
        with register_module_forward_pre_hook(watch):
            return propose(rows, gamma)

    monkeypatch.setattr(decoder.drafter, "propose", watched)
    bench.alone(decoder, 2, SamplingParams(max_tokens=6))
    assert decoder.drafter.runs_modules == ran


MIXED = (
    SamplingParams(temperature=1.0, max_tokens=17),
    SamplingParams(max_tokens=15),
    SamplingParams(temperature=0.7, top_p=0.9, max_tokens=24),
    SamplingParams(temperature=1.3, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=9),
    SamplingParams(temperature=1.0, top_k=20, min_p=0.02, max_tokens=1),
    SamplingParams(frequency_penalty=1.0, max_tokens=20, logit_bias={70: 3.0}),
)


@every_pair
def test_a_row_does_not_notice_its_neighbours(bench: Bench, case: Case, verifier: str) -> None:
    """Catches random numbers, penalties, caches or draft state that follow the batch index instead
    of the row.

    Rows of every kind join at different steps, end at different steps, and one is taken out in the
    middle. Greedy ones, and all under shared noise, have the text of plain decoding; and every
    counter adds up.
    """
    decoder = bench.decoder(case, verifier)
    has_one_text = [params.is_greedy or verifier == "gumbel" for params in MIXED]
    sampled = (
        []
        if learns(case)
        else [number for number, params in enumerate(MIXED) if not params.is_greedy]
    )
    alone = {number: bench.alone(decoder, number, MIXED[number]) for number in sampled}
    expected = [
        bench.plain(number, params, verifier).output if one_text else alone[number].output
        for number, (params, one_text) in enumerate(zip(MIXED, has_one_text, strict=True))
    ]
    joins = {0: [0, 1], 2: [2, 3], 3: [4], 5: [5]}
    aborted: Row | None = None
    done: list[Row] = []
    for step in range(60):
        for number in joins.get(step, []):
            decoder.add(bench.row(number, MIXED[number]))
        if step == 6:
            victim = next(i for i, row in enumerate(decoder.rows) if row.request == 2)
            aborted = decoder.remove(victim)
        if not len(decoder.rows):
            break
        decoder.step()
        done += [
            decoder.remove(i)
            for i in reversed(range(len(decoder.rows)))
            if decoder.rows[i].finish_reason
        ]
        assert decoder.target.kv.num_rows == len(decoder.rows)
    assert aborted is not None
    if has_one_text[2] or not learns(case):
        assert aborted.output == expected[2][: len(aborted.output)]
    assert len(done) == len(MIXED) - 1
    for row in done:
        check_stats(row)
        # what was learned from other rows may draft something else
        if has_one_text[row.request] or not learns(case):
            assert row.output == expected[row.request], row.request
        if row.request in alone and not learns(case):
            assert row.output == alone[row.request].output
            assert row.origins == alone[row.request].origins
            assert row.stats.steps == alone[row.request].stats.steps


COMMITS = [
    (case, steps) for case in CASES for steps in ((1, 2, 7) if is_thorough(case) else (2, 7))
]


@pytest.mark.parametrize(
    ("case", "steps"), COMMITS, ids=[f"{name_of(case)}-{steps}" for case, steps in COMMITS]
)
def test_commit_is_total(bench: Bench, case: Case, steps: int) -> None:
    """Catches anything a step leaves behind: every cache, and the drafter, must be as if started on
    the committed tokens."""
    decoder = bench.decoder(case)
    fresh = bench.decoder(case, copy=1)
    params = [
        SamplingParams(temperature=1.0, max_tokens=60),
        SamplingParams(max_tokens=60),
        MIXED[3],
    ]
    for number, wanted in enumerate(params):
        decoder.add(bench.row(number, wanted))
    for _ in range(steps):
        decoder.step()
    texts = [row.tokens for row in decoder.rows]
    assert decoder.target.kv.lengths == [len(tokens) - 1 for tokens in texts]
    for row in decoder.rows:
        fresh.add(row)
    with torch.inference_mode():
        fresh.catch_up()  # drafters that read the target's hidden states are told of all of them
    same_contents(decoder.target, fresh.target, texts)
    if learns(case):
        clear(decoder, fresh)
        return
    ours = decoder.drafter.propose(decoder.rows, [4, 4, 4])
    theirs = fresh.drafter.propose(fresh.rows, [4, 4, 4])
    assert torch.equal(ours.lengths, theirs.lengths)
    # beyond is padding, which may be anything
    counts = torch.arange(ours.tokens.shape[1]) < ours.lengths[:, None]
    assert torch.equal(ours.tokens[counts], theirs.tokens[counts])
    assert (ours.probs is None) == (theirs.probs is None)
    if ours.probs is not None:
        torch.testing.assert_close(
            ours.probs[:, :-1][counts], theirs.probs[:, :-1][counts], rtol=0, atol=1e-5
        )
    clear(decoder, fresh)


def clear(*decoders: Decoder) -> None:
    """Take out every unfinished row."""
    for decoder in decoders:
        while len(decoder.rows):
            decoder.remove(0)


@pytest.fixture(autouse=True)
def rows_leave(bench: Bench) -> Iterator[None]:
    """What a failed test leaves in the shared caches must not fail those after it."""
    yield
    clear(*bench.in_use)
    bench.in_use.clear()


@pytest.mark.parametrize("draft", [draft for draft in DRAFTS])
def test_draft_cache_is_that_of_the_committed_text(bench: Bench, draft: str) -> None:
    """Catches a draft cache that still holds rejected tokens, or lacks the last one after a full
    acceptance, at any step."""
    decoder = bench.decoder(("draft-model", draft, 0))
    fresh = bench.models(draft, copy=1).draft.lm
    for number in range(3):
        decoder.add(bench.row(number, SamplingParams(temperature=1.0, max_tokens=40)))
    while not any(row.finish_reason for row in decoder.rows):
        decoder.step()
        kv = decoder.drafter.lm.kv
        kv.check_integrity()
        texts = [row.tokens for row in decoder.rows]
        assert all(length < len(tokens) for length, tokens in zip(kv.lengths, texts, strict=True))
        for _ in texts:
            fresh.kv.add_row()
        same_contents(
            decoder.drafter.lm,
            fresh,
            [tokens[: n + 1] for tokens, n in zip(texts, kv.lengths, strict=True)],
        )
        for _ in texts:
            fresh.kv.swap_remove(0)
    while len(decoder.rows):
        decoder.remove(0)


@torch.inference_mode()
def same_contents(used: LM, fresh: LM, texts: list[list[int]]) -> None:
    """The used cache holds what the empty rows of `fresh` hold after being fed the texts (all but
    each last token)."""
    fresh.catch_up(texts)
    assert used.kv.lengths == fresh.kv.lengths
    for ours, theirs in zip(
        (*used.kv.keys, *used.kv.values), (*fresh.kv.keys, *fresh.kv.values), strict=True
    ):
        for row, length in enumerate(used.kv.lengths):
            torch.testing.assert_close(
                ours[row, :length], theirs[row, :length], rtol=1e-4, atol=1e-4
            )


def check_stats(row: Row) -> None:
    """Every token is accounted for once."""
    stats = row.stats
    kinds = row.origins
    assert stats.emitted == len(row.output) == len(kinds)
    assert stats.accepted == kinds.count("accepted") == sum(stats.accepted_per_position)
    # the text ended inside an accepted block: that step added no token of its own
    cut = kinds[-1] == "accepted"
    assert stats.steps == len(kinds) - kinds.count("accepted") + cut
    assert stats.emitted == stats.accepted + stats.steps - cut
    assert stats.tested == stats.accepted + kinds.count("correction")
    assert stats.accepted <= stats.tested <= stats.drafted
    assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)
    assert all(seconds >= 0 for seconds in stats.time_s.values())
    if stats.drafted == 0:
        assert set(kinds) == {"plain"}


@every_drafter
def test_limits_inside_an_accepted_block(bench: Bench, case: Case) -> None:
    """Catches overshoot: tokens, text, counters or cache entries beyond an end that falls inside an
    accepted block.

    The text's end is put at each of the first tokens in turn: as a limit, as a stop token, as a
    stop string. The rows share a batch, and each leaves it as it ends.
    """
    number = 2
    decoder = bench.decoder(case, gamma=5)
    whole = SamplingParams(max_tokens=16)
    plain = bench.plain(number, whole)
    if learns(case):
        bench.alone(decoder, number, whole)  # else there is nothing yet to draft from
    last_origins = set()
    kinds = {}
    ends = range(1, 9)
    for kind, all_params in {
        "limit": [SamplingParams(max_tokens=end) for end in ends],
        "token": [
            SamplingParams(max_tokens=16, stop_token_ids=[plain.output[end]]) for end in ends
        ],
        "string": [
            SamplingParams(max_tokens=16, stop=[plain.text[end - 1 : end + 2] or "never"])
            for end in ends
        ],
    }.items():
        for params in all_params:
            row = bench.row(number, params, text=True)
            kinds[id(row)] = kind
            decoder.add(row)
    ended: list[Row] = []
    while len(decoder.rows):
        decoder.step()
        for index in reversed(range(len(decoder.rows))):
            if decoder.rows[index].finish_reason:
                assert decoder.target.kv.lengths[index] == len(decoder.rows[index].tokens) - 1
                ended.append(decoder.remove(index))
    assert len(ended) == len(kinds) == 3 * len(ends)
    for row in ended:
        check_end(row, kinds[id(row)], plain, bench.plain(number, row.params))
        last_origins.add(row.origins[-1])
    if case[1] == "copy":
        assert "accepted" in last_origins, (
            "no end fell inside an accepted block: the test tests nothing"
        )


def check_end(row: Row, kind: str, whole: Row, expected: Row) -> None:
    """A row that ended by a limit, a stop token or a stop string, beside plain decoding without
    that end and with it."""
    assert (row.output, row.text, row.finish_reason) == (
        expected.output,
        expected.text,
        expected.finish_reason,
    )
    assert "".join(row.pieces) == row.text
    assert len(row.pieces) == len(row.output)
    check_stats(row)
    if kind == "limit":
        assert (row.output, row.finish_reason) == (whole.output[: row.params.max_tokens], "length")
    elif kind == "token":
        first = whole.output.index(row.params.stop_token_ids[0])
        assert (row.output, row.finish_reason) == (whole.output[: first + 1], "stop")
    else:
        assert row.finish_reason == "stop"
        assert row.params.stop[0] not in row.text
        assert whole.text.startswith(row.text)


NOISY = (SamplingParams(temperature=1.0, max_tokens=24), MIXED[2], MIXED[3])


@every_drafter
def test_shared_noise_gives_one_text(bench: Bench, case: Case) -> None:
    """Catches noise keyed by step, draft length or batch: under `gumbel` a seed has one text, for
    every drafter and length."""
    asked = [(number, NOISY[number // 2]) for number in range(2 * len(NOISY))]
    expected = [bench.plain(number, params, "gumbel").output for number, params in asked]
    assert expected[0] != bench.plain(0, SamplingParams(max_tokens=24)).output
    for gamma in (
        (ChangingLength(1, 3, 6), 2, 5) if is_thorough(case) else (ChangingLength(1, 3, 6),)
    ):
        decoder = bench.decoder(case, "gumbel", gamma)
        for number, params in asked:
            decoder.add(bench.row(number, params))
        rows = run_to_end(decoder)
        assert [row.output for row in rows] == expected, f"gamma {gamma}"
        for row in rows:
            check_stats(row)
