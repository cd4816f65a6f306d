"""Better options for a model-free drafter, from logged texts: a search that does not believe its own best number.

The texts are dealt into two halves, task by task. On one the options are searched (optuna's tree-structured Parzen estimator,
Bergstra et al. 2011, seeded), beginning with the configuration as it is. On the other, which the search never saw, the best
found is compared with the one it began with: that difference is what is reported, with its interval. On the texts it was chosen
on, the best of many trials looks better than it is.

Without costs the objective is tau, and the draft length stays as it is: longer drafts can hardly lower tau, so what they cost
must be known to choose among them. With costs it is the predicted speedup, and the length is searched, too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optuna

from outrider.errors import ConfigError, OutriderError
from outrider.lab.configuration import Configuration
from outrider.lab.estimate.curves import StepCosts
from outrider.lab.progress import QUIET, Progress
from outrider.lab.replay.drafters import replayable_parts
from outrider.lab.replay.replay import Order, Replay, replay
from outrider.lab.replay.replay_result import SearchOutcome
from outrider.lab.replay.spaces import Space, in_words, space_of, values_of, with_values
from outrider.lab.replay.summary import Sums, gain_interval, plain_steps, summarise, unpaid_drafting
from outrider.lab.replay.texts import Text
from outrider.models.loading.load import LoadedModel

MIN_TEXTS = 4


@dataclass(frozen=True)
class Found:
    """`configuration` is the best on the texts searched on; `outcome` says what it is worth."""

    configuration: Configuration
    outcome: SearchOutcome


def search(
    texts: Sequence[Text], configuration: Configuration, *, trials: int, seed: int = 0, space: Space | None = None,
    costs: StepCosts | None = None, target: LoadedModel | None = None, order: Order = "logged", max_num_seqs: int = 1,
    progress: Progress = QUIET,
) -> Found:  # fmt: skip
    """`space`: option -> range; default: all options of the drafter that `configuration` does not set (`spaces.py`). `costs`: of
    steps with `max_num_seqs` rows.

    Raises ConfigError for too few texts, nothing to search, or a drafter without a known space, CapabilityError for what
    cannot be replayed.
    """
    replayable_parts(configuration)
    chosen = space_of(configuration, lengths=costs is not None) if space is None else space
    start = values_of(configuration, chosen)
    check_texts(len(texts))
    check_search(trials, chosen)
    train, held_out = split_texts(texts, seed)

    def run(options: Configuration, some: Sequence[Text]) -> Replay:
        return replay(some, options, target=target, order=order, seed=seed, max_num_seqs=max_num_seqs)

    draft_s = unpaid_drafting(run(configuration, train), costs)  # the same for all: the clock must not choose among them
    tried: dict[str, float] = {}  # label -> objective

    progress.stage(f"search {configuration.label}", trials)
    study = _study(seed)
    study.enqueue_trial(start)
    for _ in range(trials):
        trial = study.ask(dict(chosen))
        options = with_values(configuration, {name: _readable(value) for name, value in trial.params.items()})
        progress.advance()
        if not _is_possible(options):
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        if options.label not in tried:
            tried[options.label] = score(run(options, train), costs, draft_s)
        trial.set_user_attr("options", options.as_dict())
        study.tell(trial, tried[options.label])
    best = Configuration(**study.best_trial.user_attrs["options"])
    before, after = run(configuration, held_out), run(best, held_out)
    outcome = SearchOutcome(
        objective="tau" if costs is None else "speedup",
        space=in_words(chosen),
        num_trials=trials,
        num_train=len(train),
        num_held_out=len(held_out),
        train_start=study.trials[0].value,
        train_best=study.best_value,
        start=summarise(before, held_out, costs, draft_s),
        best=summarise(after, held_out, costs, draft_s),
        gain=gain_interval(
            _sums(after, costs, draft_s), _sums(before, costs, draft_s), blocks=after.learns or before.learns
        ),
    )
    return Found(best, outcome)


def check_texts(num_texts: int) -> None:
    """Raises ConfigError for too few."""
    if num_texts < MIN_TEXTS:
        raise ConfigError(
            f"a search needs {MIN_TEXTS} texts at least, got {num_texts}: half of them are kept back, to see what the best "
            "settings are worth on texts they were not chosen on"
        )


def check_search(trials: int, space: Space) -> None:
    """Raises ConfigError where nothing could be found."""
    if trials < 2:
        raise ConfigError(f"a search needs 2 trials at least, the first being the configuration as it is; got {trials}")
    if not space:
        raise ConfigError("there is nothing to search: every option is set")


def score(found: Replay, costs: StepCosts | None, draft_s: float) -> float:
    """The objective: tau, or with costs the predicted speedup. `draft_s`: as for `plain_steps`."""
    emitted, paid = _sums(found, costs, draft_s)
    return sum(emitted) / sum(paid)


def split_texts(texts: Sequence[Text], seed: int) -> tuple[list[Text], list[Text]]:
    """Two halves with the same mix of tasks, each in the order of the log; of an odd number the first gets one more."""
    by_task: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        by_task.setdefault(text.task, []).append(number)
    dealer = random.Random(seed)
    dealt: list[int] = []
    for numbers in by_task.values():
        dealer.shuffle(numbers)
        dealt += numbers
    train, held_out = sorted(dealt[::2]), sorted(dealt[1::2])
    return [texts[number] for number in train], [texts[number] for number in held_out]


def _sums(found: Replay, costs: StepCosts | None, draft_s: float) -> Sums:
    """Sums of each text, in the order of the replay: tokens, and what was paid for them (in steps, or plain steps with
    costs)."""
    texts = [found.texts[number] for number in found.order]
    paid = [float(text.stats.steps) if costs is None else plain_steps(text, costs, draft_s) for text in texts]
    return [float(text.stats.emitted) for text in texts], paid


def _study(seed: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # we show our own progress
    return optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))


def _readable(value: Any) -> Any:
    """Three digits of a fraction: what a person can read, and finer than texts can tell."""
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _is_possible(options: Configuration) -> bool:
    """Values can each be right and not fit together, like min_ngram above max_ngram."""
    try:
        options.parts()
    except OutriderError:
        return False
    return True
