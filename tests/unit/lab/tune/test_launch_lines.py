"""The advice in the words of others: keys that their parsers know, numbers that are ours, honesty
where they lack something."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from outrider.lab.result import Interval
from outrider.lab.tune.forecast import Forecast, LoadStep
from outrider.lab.tune.launch_lines import launch_lines
from outrider.lab.tune.space import TrainedHead
from outrider.lab.tune.tune_result import Recommendation, Tried, TuneResult, Words

VLLM_KEYS = {  # of SpeculativeConfig, as far as we write them
    "method", "model", "num_speculative_tokens", "draft_sample_method", "prompt_lookup_max", "prompt_lookup_min",
    "num_speculative_tokens_per_batch_size", "suffix_decoding_max_tree_depth", "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
}  # fmt: skip
ENGINES = ("vLLM", "SGLang", "llama.cpp")
SPEEDUPS = {
    "draft-model k=5": 2.0,
    "draft-model k=3": 1.8,
    "ngram k=4 max_ngram=3": 1.3,
    "suffix k=6": 1.4,
    "quantised k=2": 1.1,
}


def result(
    recommended: str = "draft-model k=5",
    speedups: dict[str, float] | None = None,
    temperature: float = 0.0,
    schedule: list[tuple[int, str, int]] = (),
    *,
    speculate: bool = True,
    heads: tuple[TrainedHead, ...] = (),
    target: str = "org/target",
) -> TuneResult:
    speedups = SPEEDUPS if speedups is None else speedups
    return TuneResult(
        tried=Tried(
            temperature=temperature,
            max_new_tokens=8,
            batch_size=1,
            probe_prompts=1,
            confirm_prompts=1,
            tasks={"code": 2},
            workload="w",
            target=target,
            draft="org/draft",
            heads=list(heads),
            model_options={},
        ),
        families=[],
        plain_step_s=0.01,
        overall_speedup=speedups,
        confirmed=[],
        seconds=1.0,
        forecasts=[
            Forecast(
                family=re.sub(r" k=(auto:)?\d+", "", label),
                configuration=label,
                size=int(re.search(r"k=(?:auto:)?(\d+)", label)[1]),
                task="code",
                tau=2,
                step_s=1,
                tokens_per_s=1,
                speedup=value,
                break_even_alpha=None,
            )
            for label, value in speedups.items()
        ],
        recommendations=[
            Recommendation(
                task="all",
                speculate=speculate,
                configuration=recommended,
                options={},
                speedup=Interval(value=2.0, low=1.9, high=2.1),
                reason="it was measured",
            )
        ],
        schedule=[
            LoadStep(
                batch_size=rows,
                configuration=label,
                size=size,
                tokens_per_s=2,
                plain_tokens_per_s=1,
                speedup=2,
            )
            for rows, label, size in schedule
        ],
    )


def words(made_from: TuneResult) -> dict[str, Words]:
    return {one.engine: one for one in launch_lines(made_from)}


def vllm_config(made_from: TuneResult) -> dict[str, Any]:
    found = words(made_from)["vLLM"].text
    return json.loads(re.search(r"--speculative-config '(.*)'$", found)[1])


def test_every_engine_is_addressed() -> None:
    assert tuple(words(result())) == ENGINES


def test_vllm_draft_model() -> None:
    assert vllm_config(result()) == {
        "method": "draft_model",
        "model": "org/draft",
        "num_speculative_tokens": 5,
    }


def test_mask_tokens_are_vllm_s_alone() -> None:
    """It is told to draft in one pass; who would draft token by token says so."""
    made_from = result("draft-model k=5")
    made_from.tried.draft_masked = True
    assert vllm_config(made_from)["parallel_drafting"] is True
    others = words(made_from)
    for engine in ("SGLang", "llama.cpp"):
        assert any("without its mask token" in note for note in others[engine].notes)


def test_an_automatic_length_is_its_bound_elsewhere() -> None:
    """The best configuration may choose its lengths itself: `auto:8` is no number."""
    best = {"draft-model k=auto:8": 2.0}
    assert vllm_config(result("draft-model k=auto:8", best))["num_speculative_tokens"] == 8


@pytest.mark.parametrize(
    ("label", "options"),
    [
        ("retrieval k=5 branches=1 corpus=texts", {"branches": "1", "corpus": "texts"}),
        ("composite k=5 parts=suffix,ngram mode=best", {"parts": "suffix,ngram"}),
        ("ngram-cache k=5", {}),
    ],
)
def test_vllm_takes_look_ups_that_it_does_not_have_from_us(
    label: str, options: dict[str, str]
) -> None:
    made = result(label, {label: 1.9, "ngram k=4": 1.2}, schedule=[(8, "none", 0)])
    text = words(made)["vLLM"].text
    speculative, additional = re.search(
        r"--speculative-config '(.*)' --additional-config '(.*)'$", text
    ).groups()
    assert json.loads(speculative) == {
        "method": "custom_class",
        "model": "outrider.integrations.vllm.Proposer",
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [[1, 7, 5], [8, 4096, 0]],
    }
    drafter = label.partition(" ")[0]
    assert json.loads(additional) == {"outrider": {"drafter": drafter, "drafter_options": options}}
    assert any("outrider alongside vLLM" in note for note in words(made)["vLLM"].notes)


def test_vllm_takes_no_composite_with_a_model() -> None:
    made = result(
        "composite k=5 parts=draft-model,suffix",
        {"composite k=5 parts=draft-model,suffix": 1.9, "ngram k=4": 1.2},
    )
    assert vllm_config(made)["method"] == "ngram"


def test_our_own_look_up_is_named_beside_vllm_s() -> None:
    made = result("suffix k=6", {"suffix k=6": 1.4})
    assert vllm_config(made)["method"] == "suffix"
    assert any(
        '"drafter": "suffix"' in note and "custom_class" in note
        for note in words(made)["vLLM"].notes
    )


def test_sglang_takes_look_ups_from_us() -> None:
    """By the environment, which reaches every process on a node."""
    label = "composite k=5 parts=suffix,ngram mode=best"
    found = words(result(label, {label: 1.9, "ngram k=4": 1.2}))["SGLang"]
    command = shlex.split(found.text.replace("\\\n", " "))
    assert command[:3] == [
        "env",
        "OUTRIDER_DRAFTER=composite",
        'OUTRIDER_DRAFTER_OPTIONS={"parts": "suffix,ngram"}',
    ]
    assert command[-4:] == [
        "--speculative-algorithm",
        "OUTRIDER",
        "--speculative-num-draft-tokens",
        "6",
    ]
    assert any("not yet run on a GPU" in note for note in found.notes)


def test_vllm_samples_from_the_draft_s_distribution() -> None:
    """Its default draws nothing: a sampled target would accept with p alone. So does its model
    runner V1 when given `block`."""
    sampled = result(temperature=0.7)
    found = vllm_config(sampled)
    assert found["draft_sample_method"] == "probabilistic"
    assert "rejection_sample_method" not in found
    assert any("block" in note and "V1 ignores it" in note for note in words(sampled)["vLLM"].notes)
    assert not any("block" in note for note in words(result())["vLLM"].notes)


def test_vllm_table_covers_every_batch_size_once() -> None:
    found = vllm_config(result(schedule=[(4, "draft-model k=3", 3), (16, "none", 0)]))
    table = found["num_speculative_tokens_per_batch_size"]
    assert [line[2] for line in table] == [5, 3, 0]
    covered = [rows for low, high, _ in table for rows in range(low, high + 1)]
    assert covered == list(range(1, 4097))
    assert set(found) <= VLLM_KEYS


def test_a_table_never_asks_for_more_than_the_bound() -> None:
    """vLLM cuts a line above num_speculative_tokens down without a word."""
    made = result(
        "draft-model k=3",
        {"draft-model k=3": 1.9, "draft-model k=5": 1.2},
        schedule=[(4, "draft-model k=5", 5)],
    )
    assert vllm_config(made) == {
        "method": "draft_model",
        "model": "org/draft",
        "num_speculative_tokens": 3,
    }, "no table at all"


@pytest.mark.parametrize("best", ["ngram k=4 max_ngram=3", "suffix k=6"])
def test_vllm_model_free(best: str) -> None:
    found = vllm_config(result(best, {best: 1.5}))
    assert set(found) <= VLLM_KEYS
    assert found["method"] == best.split()[0]
    if best.startswith("ngram"):
        assert (found["prompt_lookup_max"], found["prompt_lookup_min"]) == (3, 1)


def test_sglang_verifies_one_token_more_than_it_drafts() -> None:
    """The pending token counts there."""
    text = words(result())["SGLang"].text
    assert "--speculative-num-steps 5" in text
    assert "--speculative-num-draft-tokens 6" in text


def test_an_engine_without_the_drafter_says_so() -> None:
    """Guards against silently recommending something else."""
    made = result("quantised k=2", {"quantised k=2": 2.0, "ngram k=4 max_ngram=3": 1.3})
    for one in words(made).values():
        assert one.text
        note_text = (
            "Recommended is quantised k=2, which it does not have (quantised); this is ngram k=4"
        )
        assert any(note_text in note for note in one.notes)


def test_an_engine_with_nothing_that_pays() -> None:
    for one in words(result("quantised k=2", {"quantised k=2": 2.0, "ngram k=4": 0.8})).values():
        assert not one.text
        assert "no drafter that paid" in one.notes[0]


def test_do_not_speculate_reaches_everybody() -> None:
    for one in words(result("none", speculate=False)).values():
        assert not one.text
        assert "Do not speculate" in one.notes[0]


def test_trees_are_not_exported_as_chains() -> None:
    found = vllm_config(
        result(
            "draft-model k=15 tree=sequoia",
            {"draft-model k=15 tree=sequoia": 3.0, "draft-model k=2": 1.2},
        )
    )
    assert found["num_speculative_tokens"] == 2


# ---------------------------------------------------------------- trained heads

DFLASH = TrainedHead(kind="block", folder="runs/block", max_chain=7)
DSPARK = TrainedHead(kind="block", folder="runs/block", max_chain=8, confidence=True, markov=True)
OF = {
    "eagle": TrainedHead(kind="eagle", folder="runs/eagle"), "eagle3": TrainedHead(kind="eagle3", folder="runs/eagle3"),
    "medusa": TrainedHead(kind="medusa", folder="runs/medusa", max_chain=4),
}  # fmt: skip


def headed(head: TrainedHead, size: int = 4, more: str = "", **others: Any) -> dict[str, Words]:
    """Words about this head, with look-up as the second best."""
    label = f"{head.kind} k={size}{more} head={head.folder}"
    return words(result(label, {label: 2.0, "ngram k=4": 1.2}, heads=(head,), **others))


@pytest.mark.parametrize(
    ("head", "method", "size", "layout"),
    [
        (OF["eagle"], "eagle", 4, "raw"),
        (OF["eagle3"], "eagle3", 4, "raw"),
        (OF["medusa"], "medusa", 4, "vllm"),
        (DFLASH, "dflash", 7, "raw"),
        (DSPARK, "dspark", 8, "raw"),
    ],
)
def test_vllm_gets_the_method_and_how_to_get_the_head(
    head: TrainedHead, method: str, size: int, layout: str
) -> None:
    """As `benchmarks/head_in_vllm.py` runs them. Block heads are run whole: fewer masks would be
    another computation."""
    found = headed(head)["vLLM"]
    config = json.loads(re.search(r"--speculative-config '(.*)'$", found.text)[1])
    assert config == {"method": method, "model": "EXPORTED_HEAD", "num_speculative_tokens": size}
    assert (
        f"First: outrider export {head.folder} --target org/target --to {layout} --out EXPORTED_HEAD"
        in found.notes
    )
    assert any("Triton" in note for note in found.notes) == (method == "dspark")


def test_a_block_head_is_drafted_whole_or_not_at_all() -> None:
    label = {size: f"block k={size} head={DFLASH.folder}" for size in (2, 4)}
    speedups = {label[2]: 1.3, label[4]: 2.0}
    schedule = [(4, label[2], 2), (16, "none", 0)]
    made = result(label[4], speedups, heads=(DFLASH,), schedule=schedule)
    assert [line[2] for line in vllm_config(made)["num_speculative_tokens_per_batch_size"]] == [
        7,
        7,
        0,
    ]


@pytest.mark.parametrize(("kind", "algorithm"), [("eagle", "EAGLE"), ("eagle3", "EAGLE3")])
def test_sglang_eagle(kind: str, algorithm: str) -> None:
    """EAGLE for an EAGLE-3 head starts, and accepts nothing."""
    text = headed(OF[kind])["SGLang"].text
    assert (
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path EXPORTED_HEAD" in text
    )
    assert (
        "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5"
        in text
    )


def test_sglang_builds_eagle_s_trees() -> None:
    """The tree's own numbers: eight levels at most, four branches, the pending token counted."""
    found = headed(OF["eagle3"], 15, " tree=best-first")["SGLang"]
    assert (
        "--speculative-num-steps 8 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
        in found.text
    )
    assert not any(note.startswith("Recommended") for note in found.notes)


@pytest.mark.parametrize(
    ("head", "algorithm", "size"),
    [(DFLASH, "DFLASH", " --speculative-num-draft-tokens 8"), (DSPARK, "DSPARK", "")],
)
def test_sglang_block(head: TrainedHead, algorithm: str, size: str) -> None:
    line = headed(head)["SGLang"].text.splitlines()[-1].strip()
    assert (
        line
        == f"--speculative-algorithm {algorithm} --speculative-draft-model-path EXPORTED_HEAD{size}"
    )


@pytest.mark.parametrize(
    ("head", "kind", "size"),
    [(OF["eagle3"], "eagle3", 4), (DFLASH, "dflash", 7), (DSPARK, "dspark", 8)],
)
def test_llamacpp_heads(head: TrainedHead, kind: str, size: int) -> None:
    found = headed(head)["llama.cpp"]
    assert found.text.endswith(f"--spec-type draft-{kind} -md HEAD.gguf --spec-draft-n-max {size}")
    assert any("--target-model-dir org/target" in note for note in found.notes)


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("eagle", {"llama.cpp"}),
        ("eagle3", set()),
        ("medusa", {"SGLang", "llama.cpp"}),
    ],
)
def test_who_cannot_run_a_kind_says_so(kind: str, without: set[str]) -> None:
    """And what is second best there."""
    for engine, found in headed(OF[kind]).items():
        says = any(
            "which it does not have" in note and "this is ngram k=4" in note for note in found.notes
        )
        assert says == (engine in without), engine


def test_who_has_the_head_but_not_the_tree_says_that() -> None:
    label = "eagle3 k=15 tree=best-first head=runs/eagle3"
    chain = "eagle3 k=4 head=runs/eagle3"
    found = words(result(label, {label: 2.0, chain: 1.8}, heads=(OF["eagle3"],)))["vLLM"]
    assert any(
        f"Recommended is {label}, whose trees it does not have; this is {chain}" in note
        for note in found.notes
    )


def test_the_demo_s_own_heads_can_be_exported() -> None:
    made = words(
        result(
            "eagle3 k=4",
            {"eagle3 k=4": 2.0},
            heads=(TrainedHead(kind="eagle3", folder=""),),
            target="demo",
        )
    )
    assert any(
        "outrider export outrider/demo/models/heads/eagle3 --target demo" in note
        for note in made["vLLM"].notes
    )


def test_a_trained_exit_is_ours_alone() -> None:
    label = "early-exit k=3 head=runs/exit"
    made = words(
        result(
            label,
            {label: 1.4, "ngram k=4": 1.2},
            heads=(TrainedHead(kind="early-exit", folder="runs/exit"),),
        )
    )
    for one in made.values():
        assert any("which no other program reads; this is ngram k=4" in note for note in one.notes)
