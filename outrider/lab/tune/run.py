"""`run_tune`: from options and a workload to a result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outrider.build import DEMO, Options, target_config
from outrider.drafters.window import windowed_draft
from outrider.errors import CapabilityError, ConfigError, counted
from outrider.lab.journal import Journal
from outrider.lab.progress import QUIET, Progress
from outrider.lab.runner import Runner
from outrider.lab.tune.decide import recommendations
from outrider.lab.tune.drafts import MODEL, Drafts, read_drafts
from outrider.lab.tune.families import default_space
from outrider.lab.tune.forecast import step_costs
from outrider.lab.tune.launch_lines import launch_lines
from outrider.lab.tune.probe import survival
from outrider.lab.tune.space import MIN_PROBED, Family, TuneRequest
from outrider.lab.tune.tune import MIN_PROMPTS, Tuner
from outrider.lab.tune.tune_result import FamilySummary, Tried, TuneResult
from outrider.lab.workload.prompts import PreparedPrompt, prepare
from outrider.lab.workload.types import OnBad, Workload, identity
from outrider.models.heads.kinds import ACCEPTANCE
from outrider.models.loaded import LoadedModel
from outrider.models.loading.load import resolve_device

PROBE_SHARE = 8  # one prompt in this many is for the probes
MAX_PROBED = 8  # prompts of a task


def run_tune(
    options: Options,
    request: TuneRequest,
    workload: Workload,
    journal_path: Path,
    *,
    resume: bool = False,
    on_bad: OnBad = "refuse",
    chat_template: bool = True,
    progress: Progress = QUIET,
) -> TuneResult:
    """`options`: of models and machine. Raises what cannot be built or run."""
    asked = {**asdict(request), "drafters": sorted(request.drafters)}
    facts = identity("tune", options, workload, chat_template=chat_template, **asked)
    with Journal.open(journal_path, facts, resume=resume, progress=progress) as journal:
        drafts = read_drafts(options, request.drafts)
        options = replace(options, draft=drafts.model)
        families = choose_space(options, request, drafts)
        runner = Runner(options, [family.largest for family in families], progress.say)
        prompts, notes = gather_prompts(
            workload, runner, request, on_bad=on_bad, chat_template=chat_template
        )
        families += in_long_texts(families, runner.models.draft, prompts)
        probe, confirm = split(prompts)
        if len(confirm) < request.batch_size:
            raise ConfigError(
                f"{len(confirm)} prompts to confirm with are no batch of {request.batch_size}: "
                "raise --limit"
            )
        members = sum(len(family.sizes) for family in families)
        progress.say(
            f"{len(families)} families with {members} members; {counted(len(probe), 'prompt')} to "
            f"probe, {len(confirm)} to confirm"
        )
        tuner = Tuner(runner, families, request, probe, confirm, journal)
        tuner.run()
    draft = runner.models.draft
    tried = Tried(
        temperature=request.sampling.temperature,
        max_new_tokens=request.sampling.required_max_tokens,
        batch_size=request.batch_size,
        probe_prompts=len(probe),
        confirm_prompts=len(confirm),
        tasks=_count(prompts),
        workload=workload.name,
        target=options.target,
        draft=options.draft,
        draft_masked=draft is not None and draft.mask_token is not None,
        heads=list(drafts.heads),
        model_options=_plain_options(options),
    )
    result = summarise_tuning(tuner, tried, [*workload.notes, *runner.models.notes, *notes])
    result.advice = launch_lines(result)
    return result


def choose_space(options: Options, request: TuneRequest, drafts: Drafts) -> list[Family]:
    """The families to be tried. Raises ConfigError when the user's wishes leave nothing, or leave
    out a head that was named."""
    _check_wishes(request.drafters, drafts)
    wishes = replace(
        request,
        has_draft=drafts.model is not None or options.target == DEMO,
        heads=drafts.heads,
        num_layers=target_config(options).get_text_config().num_hidden_layers,
        on_accelerator=resolve_device(options.device).type != "cpu",
    )
    families = default_space(wishes)
    if unknown := request.drafters - {family.configuration.drafter for family in families}:
        known = {
            family.configuration.drafter
            for family in default_space(replace(wishes, drafters=frozenset()))
        }
        raise ConfigError(
            f"cannot tune {', '.join(sorted(unknown))} here; there are: "
            f"{', '.join(sorted(known))} (--draft names draft models "
            "and trained heads, retrieval needs --space corpus=FILE, some drafters need trees)"
        )
    return families


def in_long_texts(
    families: Sequence[Family], draft: LoadedModel | None, prompts: Sequence[PreparedPrompt]
) -> list[Family]:
    """Chains of the draft model within a window as long as the texts that it was trained on, where
    some text will be longer."""
    chains = next((family for family in families if family.label == MODEL), None)
    if draft is None or chains is None:
        return []
    longest = max(len(prompt.tokens) + prompt.max_tokens for prompt in prompts)
    try:
        windowed, _ = windowed_draft(draft, "auto", longest, chains.sizes[-1])
    except (CapabilityError, ConfigError):  # it cannot have one
        return []
    return [] if windowed is draft else [Family.of(MODEL, chains.sizes, window="auto")]


def _check_wishes(drafters: frozenset[str], drafts: Drafts) -> None:
    for head in drafts.heads if drafters else ():
        drafter = MODEL if head.kind == ACCEPTANCE else head.kind
        if head.folder and drafter not in drafters:
            raise ConfigError(
                f"--draft {head.folder} is for drafter '{drafter}', which --drafters does not "
                "name: leave one out"
            )


def gather_prompts(
    workload: Workload, runner: Runner, request: TuneRequest, *, on_bad: OnBad, chat_template: bool
) -> tuple[list[PreparedPrompt], list[str]]:
    """The first `request.prompts` of every task, as token ids, numbered; in place of those that are
    skipped later ones. Raises ConfigError as `prepare` does."""
    prepared = prepare(
        workload,
        runner.tokenizer,
        context=runner.context,
        max_tokens=request.sampling.required_max_tokens,
        on_bad=on_bad,
        chat_template=chat_template,
        per_task=request.prompts,
        answer=runner.answer,
    )
    prompts = [replace(prompt, number=number) for number, prompt in enumerate(prepared.prompts)]
    if min(_count(prompts).values()) < 2 * MIN_PROBED:
        raise ConfigError(
            f"every task needs {2 * MIN_PROBED} prompts, to probe some and confirm with others; "
            f"got {_count(prompts)}"
        )
    return prompts, prepared.notes


def split(prompts: Sequence[PreparedPrompt]) -> tuple[list[PreparedPrompt], list[PreparedPrompt]]:
    """Some of each task for the probes, all others for the confirmation."""
    quota = {
        task: min(max(MIN_PROBED, count // PROBE_SHARE), MAX_PROBED)
        for task, count in _count(prompts).items()
    }
    probe: list[PreparedPrompt] = []
    confirm: list[PreparedPrompt] = []
    for prompt in prompts:
        quota[prompt.request.task] -= 1
        (probe if quota[prompt.request.task] >= 0 else confirm).append(prompt)
    return probe, confirm


def _count(prompts: Sequence[PreparedPrompt]) -> dict[str, int]:
    return dict(Counter(prompt.request.task for prompt in prompts))


def _plain_options(options: Options) -> dict[str, Any]:
    """Options of models and machine, as they were asked for."""
    names = ("dtype", "quantise", "device", "threads", "runtime", "max_model_len", "revision")
    return {
        name: value
        for name, value in asdict(options).items()
        if name in names and value is not None
    }


def summarise_tuning(tuner: Tuner, tried: Tried, notes: list[str]) -> TuneResult:
    """Everything a report or another program may want."""
    costs = step_costs(tuner.plain, tried.batch_size)
    failed = [
        f"{label} could not be confirmed: {why}"
        for label, why in tuner.failures.items()
        if label in tuner.family_of
    ]
    return TuneResult(
        notes=[*notes, *failed, *_cut_short(tuner)],
        interrupted=tuner.interrupted,
        tried=tried,
        families=[_family(family, tuner) for family in tuner.families.values()],
        plain_step_s=costs.step_s(0)[0] if costs is not None else 0.0,
        forecasts=tuner.forecasts,
        overall_speedup=tuner.overall,
        confirmed=tuner.confirmed,
        others=tuner.others,
        recommendations=recommendations(tuner, tried.draft),
        schedule=tuner.schedule,
        by_load=tuner.by_load,
        seconds=tuner.seconds_spent,
    )


def _cut_short(tuner: Tuner) -> list[str]:
    """A warning about advice that rests on less than half of the prompts there should have been
    time for."""
    run = max((summary.texts for summary in tuner.confirmed), default=0)
    wanted = min(MIN_PROMPTS, len(tuner.to_confirm))
    if tuner.interrupted or not 0 < 2 * run < wanted:
        return []
    return [
        f"confirming ended after {run} of {counted(len(tuner.to_confirm), 'prompt')}: they took "
        "longer than the probes foretold, so "
        "the advice rests on few; run it again on a calm machine, or with a higher --space most_share=SHARE"
    ]


def _family(family: Family, tuner: Tuner) -> FamilySummary:
    probe = tuner.probes.get(family.label)
    if probe is None:
        return FamilySummary(
            family=family.label,
            survival={},
            step_s={},
            seconds=0.0,
            failure=tuner.failures.get(family.label, "not run"),
        )
    costs = step_costs(probe)
    points = [] if costs is None else costs.target.points
    curves = {
        task: survival(steps, family.sizes[-1]) if family.nested else []
        for task, steps in probe.steps.items()
    }
    return FamilySummary(
        family=family.label,
        survival=curves,
        step_s={point.num_tokens - 1: point.seconds for point in points},
        seconds=probe.seconds,
    )
