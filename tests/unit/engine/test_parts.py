"""The engine's small parts by themselves: queue, KV budget, drafters side by side, calibration,
requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from outrider.build import Options
from outrider.drafters.base import SMALL_TREE
from outrider.engine.drafter_mux import verdict_for
from outrider.engine.engine import make_engine
from outrider.engine.observer import Observer, StepReport
from outrider.engine.prefill import Prefiller, make_pool
from outrider.engine.request import ActiveRequest, EngineSettings, Request, Speculation
from outrider.engine.scheduler import KVBudget, WaitingQueue
from outrider.errors import CapabilityError, ConfigError
from outrider.kv.cache import BLOCK, KVCache, LayerShape
from outrider.kv.draft_pages import DraftPages
from outrider.models.lm import PREFILL_CHUNK
from outrider.models.loading.load import build_lm
from outrider.sampling.params import SamplingParams
from outrider.stats import PartStats, sum_parts
from outrider.types import Draft, Verdict, VerdictLists
from tests.helpers import make_row, tiny_llama
from tests.unit.engine.conftest import MakeEngine, Models, ask, request


@dataclass(eq=False)
class Member:
    rank: tuple[int, int]

    def __lt__(self, other: Member) -> bool:
        return self.rank < other.rank


def test_the_queue_is_by_priority_then_arrival() -> None:
    """And whoever left or came back is where they belong."""
    queue: WaitingQueue[Member] = WaitingQueue()
    members = [Member((priority, number)) for number, priority in enumerate([1, 0, 1, 0])]
    for member in members:
        queue.push(member)
    queue.remove(members[1])
    assert queue.first() is members[3]
    queue.push(members[1])  # preempted: back with its old number
    order = []
    while (member := queue.first()) is not None:
        order.append(members.index(member))
        queue.remove(member)
    assert order == [1, 3, 0, 2]
    assert len(queue) == 0


def cache() -> KVCache:
    return KVCache([LayerShape(1, 2, 2)], torch.float32, "cpu")


def test_room_shrinks_what_is_too_large_and_refuses_what_does_not_fit() -> None:
    """A cache that grew for many short rows gives way to one long row."""
    batch = cache()
    prompts = cache()
    budget = KVBudget(8 * BLOCK, batch, prompts)
    for _ in range(4):
        assert budget.has_row(100, 0)
        batch.add_row()
    assert not budget.has_row(100, 0), "slots come in powers of two: 8, and one for prompts"
    for _ in range(4):
        batch.swap_remove(0)
    assert budget.longest == 4 * BLOCK
    assert budget.has_row(budget.longest, budget.longest)
    batch.add_row()
    batch.reserve(1, budget.longest)
    prompts.reserve(1, budget.longest)
    assert (
        batch.num_slots * batch.capacity + prompts.num_slots * prompts.capacity <= budget.positions
    )


def test_a_second_prompt_needs_a_slot_of_its_own() -> None:
    """It takes as much as the one that is read: catches a budget that counts the prompts there are,
    not the one that comes."""
    batch = cache()
    prompts = cache()
    budget = KVBudget(8 * BLOCK, batch, prompts)
    prompts.add_row()
    assert budget.has_row(100, 3 * BLOCK), "two rows of a block, and two prompts of three"
    assert not budget.has_row(100, 4 * BLOCK)
    assert budget.has_row(100, 0)


def test_a_cache_does_not_shrink_below_what_is_in_use() -> None:
    """Committed positions are never lost."""
    one = cache()
    one.add_row()
    one.reserve(1, BLOCK + 5)
    one.advance(0, BLOCK + 5)
    with pytest.raises(ValueError, match="do not fit"):
        one.shrink(1, BLOCK)


@pytest.mark.parametrize("wanted", [None, 1])
@torch.inference_mode()
def test_a_prompt_in_chunks_leaves_the_hidden_state_of_every_token(wanted: int | None) -> None:
    """To the last one of each chunk, padded passes or not: catches a drafter that starts with a
    gap."""
    lm = build_lm(tiny_llama(50), "tiny", torch.float32, torch.device("cpu"))
    lm.limits = replace(lm.limits, granularity=8)
    text = [(7 * index + index // 3) % 49 + 1 for index in range(2 * PREFILL_CHUNK + 12)]
    prefiller = Prefiller(lm, make_pool(lm, 0), DraftPages([], 0), (0, 1))
    asked = request(text, prompt_logprobs=wanted)
    row = make_row(text, asked.params)
    active = ActiveRequest(
        asked, lambda update: None, row, 0, "draft-model", lossless=True, reproducible=True
    )
    prefiller.begin(active)
    while prefiller.advance() is None:
        pass
    assert [start for start, _ in active.signals] == [0, PREFILL_CHUNK, 2 * PREFILL_CHUNK]
    lm.kv.add_row()
    expected = lm.forward(torch.tensor([text[:-1]]), capture=(0, 1)).hidden
    for layer in (0, 1):
        states = torch.cat([hidden[layer] for _, hidden in active.signals])
        assert torch.allclose(states, expected[layer][0], atol=1e-5)


def chain(tokens: list[list[int]], lengths: list[int]) -> Draft:
    return Draft(torch.tensor(tokens), torch.tensor(lengths))


@pytest.mark.parametrize(
    ("extra", "allow_lossy", "verifier", "message"),
    [
        (("eagle3",), (), "auto", "extra drafter 'eagle3' needs a trained head"),
        (("suffix", "draft-model"), (), "auto", "extra drafter 'draft-model' needs a draft model"),
        (
            ("recycling",),
            (),
            "token",
            "verifier 'token' takes chains, but extra drafter 'recycling' drafts trees",
        ),
        ((), ("typicl",), "auto", "Did you mean 'typical'"),
        ((), ("block",), "auto", "'block' is lossless"),
    ],
)
def test_what_a_server_cannot_have_is_reported_before_models_are_read(
    extra: tuple[str, ...], allow_lossy: tuple[str, ...], verifier: str, message: str
) -> None:
    """Guards against minutes of loading for one line, and a verifier that is replaced without a
    word."""
    options = Options(target="/no/such/model", drafter="ngram", verifier=verifier)
    with pytest.raises((ConfigError, CapabilityError), match=message):
        make_engine(options, extra_drafters=extra, allow_lossy=allow_lossy)


def test_no_drafter_is_asked_for_more_than_it_was_built_for(engine_of: MakeEngine) -> None:
    """The server's number is about its own drafter; another one's most is what `max_draft_tokens`
    may be at most, too."""
    asked: list[int] = []

    class Watching(Observer):
        def stepped(self, report: StepReport) -> None:
            asked.extend(report.asked)

    engine = engine_of(
        drafter="ngram", draft=False, num_draft_tokens=12, extra=("suffix",), observer=Watching()
    )
    text = [1, 2, 3, 4] * 12
    for drafter, max_nodes in (("suffix", SMALL_TREE), ("ngram", 12)):
        asked.clear()
        (answer,) = ask(
            engine, request(text, max_tokens=40, speculation=Speculation(drafter=drafter))
        )
        answer.wait()
        assert max(asked) == max_nodes


def test_steps_are_reported_by_part(engine_of: MakeEngine) -> None:
    """Of rows whose drafts have parts; together they are what the answer counts, where it ends in
    the middle of a draft, too."""
    seen: dict[str, list[dict[str, PartStats]]] = {"composite": [], "ngram": []}

    class Watching(Observer):
        def stepped(self, report: StepReport) -> None:
            for drafter, parts in zip(report.drafters, report.parts, strict=True):
                seen[drafter].append(parts)

    engine = engine_of(drafter="composite", extra=("ngram",), observer=Watching())
    text = [1, 2, 3, 4] * 12
    ours, others = ask(
        engine,
        request(text, max_tokens=42),
        request(text, max_tokens=42, speculation=Speculation(drafter="ngram")),
    )
    stats = ours.finish.stats
    assert others.finish.stats.parts == {}
    assert not any(seen["ngram"])
    assert sum_parts(*seen["composite"]) == stats.parts
    assert set(stats.parts) == {"draft-model", "suffix"}
    assert sum(counts.accepted for counts in stats.parts.values()) == stats.accepted > 0


def test_a_drafter_observes_what_rows_that_are_not_its_own_emit() -> None:
    """As if it had drafted nothing there."""
    own = chain([[5, 6], [0, 0]], [2, 0])
    draft = chain([[5, 6, 0], [7, 8, 9]], [2, 3])
    lists = VerdictLists([[0, -1, -1], [0, 1, -1]], [1, 2], [3, 4], [False, False])
    seen = verdict_for(
        own, [True, False], draft, Verdict.of_lists(lists, 3, torch.device("cpu"))
    ).lists
    assert seen.num_accepted == [1, 0]
    assert seen.path[0] == [0, -1]
    assert seen.next_token == [3, 7], "row 1 went on with token 7, another drafter's"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "sometimes"}, "must be 'auto', 'fixed' or 'off'"),
        ({"mode": "fixed"}, "needs max_draft_tokens"),
        ({"max_draft_tokens": 0}, "at least 1"),
        ({"mode": "off", "drafter": "ngram"}, "drafts nothing"),
        ({"lossy": "typical", "invariant": True}, "contradict"),
    ],
)
def test_speculation_that_contradicts_itself_is_refused(fields: dict, message: str) -> None:
    """Before it reaches any engine."""
    with pytest.raises(ConfigError, match=message):
        Speculation(**fields)


def test_seeded_requests_are_invariant_unless_they_say_otherwise() -> None:
    """What same seed, same text means under load."""

    def is_invariant(seed: int | None, **fields: object) -> bool:
        speculation = Speculation(**fields)  # type: ignore[arg-type]
        return Request(
            id="a", prompt=[1], params=SamplingParams(seed=seed), speculation=speculation
        ).is_invariant

    assert is_invariant(1)
    assert not is_invariant(None)
    assert not is_invariant(1, invariant=False)
    assert is_invariant(None, invariant=True)
    assert not is_invariant(1, lossy="typical")


@pytest.mark.parametrize(
    "fields", [{"max_num_seqs": 0}, {"kv_memory": 5}, {"prefix_share": 1.0}, {"max_queue": 0}]
)
def test_settings_that_cannot_be_are_refused(fields: dict) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=next(iter(fields))):
        EngineSettings(**fields)


def test_a_load_aware_control_knows_costs_before_the_first_request(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one row, for the most, and for numbers in between that were never measured."""
    monkeypatch.setattr("outrider.engine.warmup.BUDGET_S", 600.0)  # however busy this machine is
    engine = engine_of(num_draft_tokens="auto:4", max_num_seqs=6, start=False)
    goodput = engine._batch.control.drafters["draft-model"]
    for rows in (1, 3, 6):
        rates = goodput.goodput(rows)
        assert rates is not None, f"nothing is known of {rows} rows"
        assert all(rate > 0 for rate in rates)
    engine.check_integrity()
    engine.start()


@pytest.mark.parametrize(
    ("options", "invariant", "expected"),
    [
        ({}, None, True),
        ({}, False, False),
        ({"verifier": "traversal"}, None, False),
        ({"drafter_options": {"tree": "4x2x1"}}, None, False),
        ({"drafter_options": {"tree": "best-first", "adapt": True}}, None, False),
    ],
    ids=str,
)
def test_shared_noise_verifies_rows_whose_trees_it_makes_cheaper(
    options: dict[str, Any], invariant: bool | None, expected: bool, models: Models
) -> None:
    """Catches an option that is ignored: a named verifier, `invariant` of a request, another tree."""
    given = {"drafter_options": {"tree": "best-first"}, "runtime": "native"} | options
    engine = make_engine(
        Options(
            str(models.target),
            draft=str(models.draft),
            drafter="draft-model",
            num_draft_tokens=4,
            **given,
        ),
        EngineSettings(kv_memory=64 << 20),
    )
    engine.start()
    speculation = Speculation(invariant=invariant)
    asked = [
        request([5, 6, 7], speculation=speculation, temperature=heat, max_tokens=12)
        for heat in (0.0, 1.0)
    ]
    greedy, sampled = (one.wait() for one in ask(engine, *asked))
    engine.drain(30)
    engine.stop()
    assert greedy.finish.reproducible
    assert sampled.finish.reproducible is expected
