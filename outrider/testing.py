"""The contract of a drafter as tests, for packages of one's own: nothing but Outrider is needed.

    from outrider.testing import check_drafter, make_row, tiny_target

    def test_contract() -> None:
        check_drafter(MyDrafter, MySettings(window=3), prompts=["to be or not to be or"])

`check_drafter` makes these checks, each of which can be called alone:

    check_greedy     greedy texts are those of plain decoding, whatever is drafted
    check_sampling   sampled texts have the target's distribution
    check_rows       rows that join, leave and come back change neither texts nor drafts of the others

They run on `tiny_target`, a random model over bytes, on one thread and in seconds, and raise
AssertionError, or DraftError for a draft that is none. A check in which nothing was drafted fails,
too: it would prove nothing.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.build import Needs, Options, load_models
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters import DRAFTERS
from outrider.drafters.base import Drafter, DraftSetup
from outrider.drafters.proposals import laws_checked
from outrider.models.loaded import LoadedModel
from outrider.rows import Row, Rows
from outrider.run import has_ended, run_rows
from outrider.sampling.params import SamplingParams
from outrider.step import StepFacts
from outrider.stops import StopStrings
from outrider.text import Detokenizer
from outrider.types import Draft
from outrider.verifiers import VERIFIERS

EOS = 0  # the end token of the tokenizers made here
PROMPTS = ("to be or not to be or", "1, 2, 3, 1, 2, 3, 1, 2, 3, 1", "x")
GREEDY_TOKENS = 40
DRAFTED = 6  # draft tokens per step, at most
# of `check_sampling`: texts of so many tokens, each one of so many letters
SAMPLED_TOKENS = 4
LETTERS = 3
SAMPLES = 3000
AT_ONCE = 16  # rows
LEAST = 5.0  # texts that a cell of the test must expect; rarer ones are one cell together
# standard deviations of a normal distribution, to which the statistic is transformed: a right drafter
# fails once in three million runs
FAR = 5.0

# number of a row -> (parent, token) of the nodes that are drafted for it
Proposals = dict[int, list[tuple[int, int]]]


def make_row(
    tokens: Sequence[int],
    params: SamplingParams | None = None,
    *,
    seed: int | None = None,
    number: int = 0,
    tokenizer: Any = None,
    stop_tokens: frozenset[int] = frozenset(),
) -> Row:
    """A row of a batch, as the decoder gives it to a drafter.

    tokens       the prompt's token ids, the last of which is pending
    params       sampling; None: greedy with 256 tokens
    seed         None: that of `params`, else 0
    number       the caller's number for it
    tokenizer    makes text of its tokens; None: nobody reads it
    stop_tokens  tokens that end it, besides those in `params`
    """
    params = params or SamplingParams()
    chosen = params.seed if seed is None else seed
    return Row(
        request=number,
        tokens=list(tokens),
        num_prompt=len(tokens),
        params=params,
        seed=0 if chosen is None else chosen,
        max_tokens=len(tokens) + params.required_max_tokens,
        stop_tokens=stop_tokens | frozenset(params.stop_token_ids),
        named_stops=frozenset(params.stop_token_ids) - stop_tokens,
        detokenizer=None if tokenizer is None else Detokenizer(tokenizer, tokens),
        stops=StopStrings(params.stop),
    )


def make_rows(drafter: Drafter, texts: Sequence[Sequence[int]], vocab_size: int = 257) -> Rows:
    """A batch of these texts, which a drafter has been told of: what `propose` takes."""
    rows = Rows(vocab_size, torch.device("cpu"))
    for number, tokens in enumerate(texts):
        drafter.join(rows, make_row(tokens, number=number))
    return rows


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 257 tokens: the end token and every byte. Nearly every random text has
    characters spread over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|end|>": EOS, **{letter: index + 1 for index, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrapped(tokenizer)


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """transformers' form of a tokenizer, with its end token."""
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def tiny_llama(
    vocab_size: int, seed: int = 0, *, sharpness: float = 1.0, **changes: Any
) -> LlamaForCausalLM:
    """A random Llama of two layers with grouped heads. `sharpness` scales the logits: 1 is nearly
    uniform."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocab_size,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=EOS,
            **{**sizes, **changes},
        )
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    return model


def tiny_target(seed: int = 0, *, module: bool = False) -> LoadedModel:
    """A random model over bytes, loaded as a user's checkpoint is, with caches of its own. `module`:
    with the weights that drafters which require them run on."""
    return _loaded(seed, module).twin()


@cache
def _loaded(seed: int, module: bool) -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama(257, seed, sharpness=2.0).save_pretrained(Path(folder))
        byte_tokenizer().save_pretrained(Path(folder))
        options = Options(target=folder, dtype="float32", threads=1)
        return load_models(options, Needs(module=module)).target


def check_drafter(
    drafter: type[Drafter],
    settings: Any = None,
    *,
    prompts: Sequence[str] = PROMPTS,
    draft: LoadedModel | None = None,
    head: str | None = None,
) -> None:
    """All checks of this module on a class of drafters, with one set of settings.

    drafter   the class, as `outrider.drafters` in pyproject.toml names it
    settings  an instance of its `Settings`; None: their defaults
    prompts   texts that it drafts for; the first one is sampled from, with its first three letters
    draft     the draft model, for a drafter that requires one: `tiny_target(seed=1)`
    head      the folder of the head, for a drafter that requires one
    """
    check_greedy(drafter, settings, prompts=prompts, draft=draft, head=head)
    check_sampling(drafter, settings, prompts=prompts, draft=draft, head=head)
    check_rows(drafter, settings, prompts=prompts, draft=draft, head=head)


def check_greedy(drafter: type[Drafter], settings: Any = None, **given: Any) -> None:
    """Greedy texts must be those of plain decoding, with draft lengths that change from step to step
    and from row to row. Arguments: see `check_drafter`."""
    trial = _Trial.of(drafter, settings, **given)
    params = SamplingParams(max_tokens=GREEDY_TOKENS)
    drafted = 0
    for lengths in ([1], [DRAFTED], [1, 3, DRAFTED]):
        decoder = trial.decoder(lengths)
        for _ in range(2):  # the second time it may have learned them
            rows = trial.decode(decoder, params)
            _same_texts(trial, rows, trial.plain(params), f"with draft lengths {lengths}")
            drafted += sum(row.stats.drafted for row in rows)
    assert drafted, trial.idle


def check_sampling(drafter: type[Drafter], settings: Any = None, **given: Any) -> None:
    """Sampled texts must have the target's own distribution, which is worked out. A chi-square test on
    3000 texts of four tokens finds a drafter that moves one in ten of them. Arguments: see
    `check_drafter`."""
    trial = _Trial.of(drafter, settings, **given)
    prompt = trial.prompts[0]
    letters = list(dict.fromkeys(prompt))[:LETTERS]
    params = SamplingParams(
        temperature=1.0, max_tokens=SAMPLED_TOKENS, allowed_token_ids=letters, ignore_eos=True
    )
    law = trial.law(prompt, letters)
    decoder = trial.decoder([DRAFTED])
    rows = [make_row(prompt, params, seed=number, number=number) for number in range(SAMPLES)]
    with laws_checked():
        done = [row for step in run_rows(decoder, rows, AT_ONCE) for row in step if has_ended(row)]
    assert sum(row.stats.drafted for row in done), trial.idle
    distance = _distance(law, Counter(tuple(row.output) for row in done))
    assert distance < FAR, (
        f"drafter '{trial.name}' changes the distribution of sampled texts: {distance:.1f} standard "
        f"deviations from the target's, expected less than {FAR:g}. Is a token drawn and then "
        "withheld or replaced, or are `Draft.probs` others than it was drawn from?"
    )


def check_rows(drafter: type[Drafter], settings: Any = None, **given: Any) -> None:
    """Rows that join, leave in the middle and come back must keep their texts. What is drafted for them
    must follow from their own tokens, and from what was learned. Arguments: see `check_drafter`."""
    trial = _Trial.of(drafter, settings, **given)
    params = SamplingParams(max_tokens=GREEDY_TOKENS)
    decoder = trial.decoder([DRAFTED])
    steps = _Steps()
    decoder.observers.append(steps)
    waiting = trial.rows(params) + trial.rows(params, first=len(trial.prompts))
    done: list[Row] = []
    for step in itertools.count():
        if not len(decoder.rows) and not waiting:
            break
        if waiting and step % 2 == 0:
            decoder.add(waiting.pop(0))
        if step % 3 == 2 and len(decoder.rows) > 1:
            trial.leave_and_return(decoder)
        expected = trial.afresh(decoder.rows)
        decoder.step()
        if expected is not None:
            assert steps.latest == expected, (
                f"drafter '{trial.name}' drafts something else than a fresh start on the same "
                f"tokens: {_difference(expected, steps.latest)}. `commit` must leave what `start` "
                "makes of `row.tokens`, and state of rows belongs into a `PerRow`"
            )
        for index in reversed(range(len(decoder.rows))):
            if decoder.rows[index].finish_reason:
                done.append(decoder.remove(index))
    done.sort(key=lambda row: row.request)
    plain = trial.plain(params)
    _same_texts(trial, done, plain + plain, "in a batch that rows join and leave")
    assert sum(row.stats.drafted for row in done), trial.idle


class _Steps:
    """Sees every step of a decoder, and keeps what the latest one drafted."""

    def __init__(self) -> None:
        self.latest: Proposals = {}

    def observe(self, facts: StepFacts) -> None:
        self.latest = _proposals(facts.rows, facts.draft)


class _Lengths(FixedLength):
    """Draft lengths in turn, from step to step and from row to row."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(max(lengths))
        self._turns = itertools.cycle(lengths)

    def choose(self, rows: Rows) -> list[int]:
        return [row.clamp_draft(next(self._turns)) for row in rows]


@dataclass
class _Trial:
    """A drafter with settings, on the tiny model."""

    drafter: type[Drafter]
    settings: Any
    target: LoadedModel
    draft: LoadedModel | None
    head: str | None
    prompts: list[list[int]]

    @classmethod
    def of(
        cls,
        drafter: type[Drafter],
        settings: Any,
        *,
        prompts: Sequence[str] = PROMPTS,
        draft: LoadedModel | None = None,
        head: str | None = None,
    ) -> _Trial:
        settings = drafter.Settings() if settings is None else settings
        target = tiny_target(module=drafter.requirements(settings).module)
        tokenizer: Any = target.tokenizer
        tokens = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
        return cls(drafter, settings, target, draft, head, tokens)

    @property
    def name(self) -> str:
        return self.drafter.name or self.drafter.__name__

    @property
    def idle(self) -> str:
        """The message where nothing was drafted."""
        return (
            f"drafter '{self.name}' drafted nothing, so nothing was checked: give prompts, or "
            "settings, for which it drafts"
        )

    def decoder(self, lengths: Sequence[int]) -> Decoder:
        """A decoder without rows, with a drafter as new."""
        target = self.target.twin()
        draft = None if self.draft is None else self.draft.twin()
        setup = DraftSetup(target, draft, DRAFTED, self.settings, self.head)
        return self._decoder(target, self.drafter.build(setup), lengths)

    def _decoder(self, target: LoadedModel, drafter: Drafter, lengths: Sequence[int]) -> Decoder:
        is_tree = self.drafter.requirements(self.settings).trees
        verifier = VERIFIERS.load("traversal" if is_tree else "block").build(None)
        return Decoder(target.lm, drafter, verifier, _Lengths(lengths))

    def rows(self, params: SamplingParams, first: int = 0) -> list[Row]:
        return [
            make_row(prompt, params, seed=number, number=number)
            for number, prompt in enumerate(self.prompts, first)
        ]

    def decode(self, decoder: Decoder, params: SamplingParams) -> list[Row]:
        """All prompts together, in their order."""
        steps = run_rows(decoder, self.rows(params))
        done = [row for step in steps for row in step if has_ended(row)]
        return sorted(done, key=lambda row: row.request)

    def plain(self, params: SamplingParams) -> list[Row]:
        """All prompts without a drafter."""
        return self.decode(self._plain_decoder(), params)

    def _plain_decoder(self) -> Decoder:
        return self._decoder(self.target.twin(), DRAFTERS.load("none")(), [0])

    def law(self, prompt: list[int], letters: list[int]) -> dict[tuple[int, ...], float]:
        """The probability of every text of the letters, by the chain rule from the target's
        distributions after each of their beginnings."""
        law: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(SAMPLED_TOKENS):
            law = dict(self._longer(prompt, letters, law))
        return law

    def _longer(
        self, prompt: list[int], letters: list[int], law: dict[tuple[int, ...], float]
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        """Texts with one more letter, and their probabilities."""
        params = SamplingParams(max_tokens=1, logprobs=257, ignore_eos=True)
        rows = [
            make_row([*prompt, *text], params, number=number) for number, text in enumerate(law)
        ]
        for step in run_rows(self._plain_decoder(), rows):
            for row in step:
                text = tuple(row.tokens[len(prompt) : row.num_prompt])
                masses = [math.exp(row.logprobs[0][letter]) for letter in letters]
                for letter, mass in zip(letters, masses, strict=True):
                    yield (*text, letter), law[text] * mass / sum(masses)

    def leave_and_return(self, decoder: Decoder) -> None:
        """The first row makes room, as in an engine that is short of memory, and comes back as the
        last one. A drafter that learns then drafts for each row what it would have drafted."""
        before = self._learned(decoder)
        row = decoder.rows[0]
        row.num_learned = len(row.tokens)
        decoder.remove(0)
        decoder.add(row)
        row.num_learned = 0
        after = self._learned(decoder)
        assert after == before, (
            f"drafter '{self.name}' drafts something else for a row that left and came back, or for "
            f"its neighbours: {_difference(before, after)}. State of rows belongs into a `PerRow`; "
            "what is learned across rows must not learn `row.num_learned` tokens twice"
        )

    def _learned(self, decoder: Decoder) -> Proposals:
        """The present proposal of a drafter that learns."""
        rows = decoder.rows
        if not self.drafter.learns:
            return {}
        draft = decoder.drafter.propose(rows, [row.clamp_draft(DRAFTED) for row in rows])
        return _proposals(rows, draft)

    def afresh(self, rows: Rows) -> Proposals | None:
        """The proposal of a new drafter, told of the same tokens. None: it would have to know more,
        what other rows taught or hidden states."""
        fresh = self.decoder([DRAFTED])
        if self.drafter.learns or fresh.drafter.signals:
            return None
        for row in rows:
            fresh.add(row)
        with torch.inference_mode():
            fresh.catch_up()
            gamma = [row.clamp_draft(DRAFTED) for row in rows]
            return _proposals(rows, fresh.drafter.propose(fresh.rows, gamma))


def _proposals(rows: Rows, draft: Draft) -> Proposals:
    tokens, lengths = draft.lists
    parents = draft.parent_nodes().tolist()
    return {
        row.request: list(zip(parents[index], tokens[index], strict=True))[: lengths[index]]
        for index, row in enumerate(rows)
    }


def _same_texts(trial: _Trial, rows: Sequence[Row], plain: Sequence[Row], where: str) -> None:
    for row, expected in zip(rows, plain, strict=True):
        assert row.output == expected.output, (
            f"drafter '{trial.name}' changes the greedy text of prompt "
            f"{row.request % len(trial.prompts)} {where}: got {row.output}, expected "
            f"{expected.output}"
        )


def _difference(before: Proposals, after: Proposals) -> str:
    number = next(number for number in before if before[number] != after.get(number))
    return f"row {number}: got {after.get(number)}, expected {before[number]}"


def _distance(law: dict[tuple[int, ...], float], counts: Counter[tuple[int, ...]]) -> float:
    """How far counts are from a law, in standard deviations: Pearson's chi-square, made normal by
    Wilson and Hilferty's cube root."""
    total = sum(counts.values())
    if sum(counts[text] for text in law) < total:
        return math.inf  # a text that cannot be
    common = {text: mass * total for text, mass in law.items() if mass * total >= LEAST}
    rest = total - sum(common.values())
    observed = [(counts[text], expected) for text, expected in common.items()]
    if rest >= LEAST:
        observed.append((total - sum(counts[text] for text in common), rest))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in observed)
    freedom = len(observed) - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
