"""Composite drafting: who gets how many nodes, and which combinations are refused before anything
is read."""

from __future__ import annotations

import pytest
import torch

from outrider.drafters.base import Drafter
from outrider.drafters.composite import CompositeDrafter
from outrider.drafters.composite_part import TRY_AFTER, Part
from outrider.drafters.composite_settings import CompositeSettings
from outrider.drafters.requirements import Requirements
from outrider.errors import ConfigError
from outrider.parts import choose_parts
from outrider.rows import Rows
from outrider.stats import PartStats
from outrider.types import Draft, TargetOutput, Verdict
from tests.helpers import byte_tokenizer
from tests.unit.drafters.fake_target import join, step

VOCAB = byte_tokenizer().vocab_size


def successor(token: int) -> int:
    return (token + 1) % VOCAB


class Scripted(Drafter):
    """Guesses `jump` further each time, at most `most` nodes, and writes down what it hears."""

    requires = Requirements(logits=True)  # its own nodes' alone

    def __init__(self, jump: int = 1, limit: int = 99) -> None:
        self.jump = jump
        self.limit = limit
        self.budgets: list[list[int]] = []
        self.heard: list[tuple[list[int], list[int]]] = []  # nodes drafted, nodes accepted, per row
        self.closed = False

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        self.budgets.append(list(gamma))
        lengths = [min(budget, self.limit) for budget in gamma]
        start = torch.tensor([[row.tokens[-1]] for row in rows])
        tokens = (start + self.jump * torch.arange(1, max(lengths) + 1)) % rows.vocab_size
        return Draft(tokens, torch.tensor(lengths))

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        assert output.logits.shape[:2] == (draft.num_rows, draft.num_nodes + 1)
        self.heard.append((draft.lists[1], verdict.lists.num_accepted))

    def close(self) -> None:
        self.closed = True


def composite(mode: str, **parts: tuple[Scripted, bool]) -> CompositeDrafter:
    return CompositeDrafter(
        [Part(name, drafter, is_model) for name, (drafter, is_model) in parts.items()], mode
    )


def batch(drafter: Drafter, num_rows: int = 1) -> Rows:
    rows = Rows(VOCAB, torch.device("cpu"))
    for number in range(num_rows):
        join(drafter, rows, [5 + number])
    return rows


# ------------------------------------------------ one tree of all


def test_what_a_free_part_leaves_over_goes_to_the_model() -> None:
    """A budget held for a look-up that finds nothing would shorten the model's draft for nothing."""
    model = Scripted()
    free = Scripted(jump=2, limit=1)
    drafter = composite("merge", free=(free, False), model=(model, True))
    rows = batch(drafter, 2)
    draft = step(drafter, rows, [6, 3], successor)
    assert draft.lists[1] == [6, 3]
    assert model.budgets == [[5, 2]]


def test_nodes_go_where_they_are_likeliest_kept() -> None:
    """After some steps the part that is always right has the whole budget but what another's first
    node is worth."""
    right = Scripted()
    wrong = Scripted(jump=7)
    drafter = composite("merge", right=(right, False), wrong=(wrong, False))
    rows = batch(drafter)
    for _ in range(25):
        draft = step(drafter, rows, [6], successor)
    assert right.budgets[-1][0] >= 5
    assert draft.lists[1][0] <= 6
    assert right.heard[-1] == ([right.budgets[-1][0]], [right.budgets[-1][0]])
    assert wrong.heard[-1][1] == [0]


def test_a_part_is_judged_row_by_row() -> None:
    """Rows that move to another slot of the batch keep their record, and a new one does not inherit
    it."""
    model = Scripted()
    free = Scripted(jump=7)
    drafter = composite("merge", model=(model, True), free=(free, False))
    rows = batch(drafter, 3)
    for _ in range(10):
        step(drafter, rows, [4, 4, 4], successor)
    numbers = list(drafter._numbers)
    drafter.stop(0)
    rows.swap_remove(0)
    assert drafter._numbers == [numbers[2], numbers[1]]
    join(drafter, rows, [9])
    assert drafter._numbers[2] not in numbers
    step(drafter, rows, [4, 4, 4], successor)


def paths(draft: Draft, row: int, limit: int) -> set[tuple[int, ...]]:
    """Those of a row's tree that asking for `limit` nodes brings."""
    assert draft.budgets is not None
    tokens = draft.lists[0][row]
    parents = draft.parent_lists[row]
    found: dict[int, tuple[int, ...]] = {-1: ()}
    for node in range(draft.lists[1][row]):
        if draft.budgets[row][node] <= limit:
            # a parent never needs more than its child
            found[node] = (*found[parents[node]], tokens[node])
    return set(found.values())


@pytest.mark.parametrize("jump", [1, 7])
def test_what_an_earlier_part_offers_as_well_is_not_credited(jump: int) -> None:
    """Right or wrong, it is the model's: the copy stays worth what it was."""
    other = (Scripted(3, limit=2), False)
    drafter = composite(
        "merge", other=other, copy=(Scripted(jump, limit=2), False), model=(Scripted(jump), True)
    )
    rows = batch(drafter, 2)
    model, _, copy = drafter.parts
    before = copy.survival.curve(4)
    step(drafter, rows, [6, 6], successor)
    assert copy.survival.curve(4) == before
    assert (model.survival.curve(4) > before) == (jump == 1)


def test_what_a_part_adds_to_the_same_nodes_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's chain ends after two nodes, the copy's is longer: two levels of it are tested,
    the third and the fourth."""
    drafter = composite("merge", model=(Scripted(limit=2), True), copy=(Scripted(limit=4), False))
    rows = batch(drafter)
    observed: list[tuple[int, int]] = []
    monkeypatch.setattr(
        drafter.parts[1].survival, "observe", lambda row, *counts: observed.append(counts)
    )
    for follow in (lambda token: token, successor):
        assert step(drafter, rows, [8], follow).lists[1] == [4]
    assert observed == [(2, 0), (2, 2)]


@pytest.mark.parametrize("limit", [0, 2, 9])
def test_a_smaller_tree_is_what_its_nodes_say(limit: int) -> None:
    """`auto` counts what smaller trees would have kept by it: also where parts run out, or guess
    the same."""
    free = (Scripted(jump=2, limit=limit), False)
    drafter = composite(
        "merge", model=(Scripted(), True), free=free, copy=(Scripted(limit=3), False)
    )
    rows = batch(drafter, 2)
    for _ in range(5):
        step(drafter, rows, [6, 6], successor)
    largest = drafter.propose(rows, [8, 5])
    for asked in range(9):
        smaller = drafter.propose(rows, [asked, min(asked, 5)])
        for row in range(2):
            assert paths(largest, row, asked) == paths(smaller, row, 99)


def test_a_row_without_budget_gets_nothing() -> None:
    drafter = composite("merge", model=(Scripted(), True), free=(Scripted(jump=2), False))
    rows = batch(drafter, 2)
    assert step(drafter, rows, [0, 3], successor).lists[1] == [0, 3]
    assert step(drafter, rows, [0, 0], successor).num_nodes == 0


# ------------------------------------------------ the best of each row


def part(
    name: str, drafter: Scripted, *, is_model: bool, accepted: int, seconds: float = 0.0
) -> Part:
    made = Part(name, drafter, is_model, seconds_per_token=seconds)
    for _ in range(60):
        made.survival.observe(-1, 4, accepted)
    return made


@pytest.mark.parametrize(("seconds", "chosen"), [(0.01, "model"), (2.0, "free")])
def test_best_weighs_tokens_against_seconds(seconds: float, chosen: str) -> None:
    """The model keeps 4 of 4, the free part 1 of 4: worth it while its tokens are cheap."""
    model = Scripted()
    free = Scripted(jump=2)
    parts = [
        part("model", model, is_model=True, accepted=4, seconds=seconds),
        part("free", free, is_model=False, accepted=1),
    ]
    drafter = CompositeDrafter(parts, "best")
    rows = batch(drafter)
    drafter._pass_seconds = 1.0
    draft = drafter.propose(rows, [4])
    drafted = {p.name: p.draft.lists[1] for p in drafter.parts}
    assert drafted == {name: [4 * (name == chosen)] for name in ("model", "free")}
    assert draft.lists[1] == [4]
    assert model.budgets == [[4 * (chosen == "model")]]


def test_best_drops_the_rows_of_a_free_part_that_lost() -> None:
    """Two drafts of one row must not both be submitted; each row is decided by itself."""
    model = Scripted()
    free = Scripted(jump=2)
    drafter = CompositeDrafter(
        [Part("model", model, True, seconds_per_token=0.2), Part("free", free, False)], "best"
    )
    rows = batch(drafter, 2)
    drafter._pass_seconds = 1.0
    loved, hated = drafter._numbers
    for _ in range(30):
        drafter.parts[1].survival.observe(loved, 4, 4)
        drafter.parts[1].survival.observe(hated, 4, 0)
    draft = drafter.propose(rows, [4, 4])
    assert [p.draft.lists[1] for p in drafter.parts] == [[0, 4], [4, 0]]
    assert draft.lists[1] == [4, 4]


def test_best_tries_again_what_it_has_long_not_used() -> None:
    """A part that began badly would never be seen again."""
    model = Scripted()
    free = Scripted()
    parts = [
        part("model", model, is_model=True, accepted=0, seconds=1.0),
        part("free", free, is_model=False, accepted=4),
    ]
    drafter = CompositeDrafter(parts, "best")
    rows = batch(drafter)
    drafter._pass_seconds = 1.0
    for _ in range(TRY_AFTER + 1):
        step(drafter, rows, [4], successor)
    assert [budget for budget in model.budgets if budget != [0]] == [[4]]
    assert model.heard[-1] == ([4], [4])


class Forked(Scripted):
    """Guesses two tokens of which the second is `jump` further, then one after each."""

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        self.budgets.append(list(gamma))
        start = torch.tensor([[row.tokens[-1]] for row in rows])
        tokens = (start + torch.tensor([[7, self.jump, 14, 2 * self.jump]])) % rows.vocab_size
        lengths = torch.tensor([min(budget, 4) for budget in gamma])
        return Draft(tokens, lengths, torch.tensor([[-1, -1, 0, 1]]).expand(len(rows), -1))


@pytest.mark.parametrize("mode", ["merge", "best"])
def test_a_tree_of_the_model_is_worth_its_levels(mode: str) -> None:
    """Counted as a chain of as many nodes, half of it would be beyond its last level."""
    model = Part("model", Forked(), True)
    assert model.worth(3, 0) == model.survival.curve(3, 0)
    drafter = CompositeDrafter([model, Part("free", Scripted(jump=3, limit=1), False)], mode)
    drafter._pass_seconds = 1.0
    rows = batch(drafter)
    for _ in range(20):
        draft = step(drafter, rows, [5], successor)
    number = drafter._numbers[0]
    assert model.nodes_per_level == 2
    first, second = model.survival.curve(2, number)
    assert first > 0.8
    assert model.worth(4, number) == [first / 2, first / 2, second / 2, second / 2]
    assert draft.lists[0][0][:2] == [draft.lists[0][0][1] + 6, draft.lists[0][0][1]]
    assert model.drafter.heard[-1] == ([4], [2])


def test_what_a_tree_would_be_with_fewer_nodes_is_not_said() -> None:
    """Its first nodes are not the tree of a smaller budget; a row without it has chains."""
    model = Forked()
    drafter = composite("merge", model=(model, True), free=(Scripted(jump=3), False))
    rows = batch(drafter, 2)
    draft = step(drafter, rows, [6, 0], successor)
    assert draft.budgets is not None
    assert (draft.budgets[0], draft.budgets[1]) == (None, [0] * draft.num_nodes)


def test_drafts_are_counted_by_part() -> None:
    """A node that both have is the model's; all together are the row's own counters."""
    drafter = composite("merge", free=(Scripted(limit=4), False), model=(Scripted(limit=2), True))
    rows = batch(drafter)
    for gamma, follow in ((8, successor), (8, lambda token: token), (0, successor)):
        step(drafter, rows, [gamma], follow)
    assert rows[0].stats.parts == {"model": PartStats(2, 4, 2), "free": PartStats(2, 4, 2)}
    assert (rows[0].stats.drafted, rows[0].stats.accepted) == (8, 4)


def test_a_row_whose_best_part_drafts_is_counted_for_it_alone() -> None:
    model = Part("model", Scripted(), True, seconds_per_token=9.0)
    drafter = CompositeDrafter([model, Part("free", Scripted(limit=3), False)], "best")
    drafter._pass_seconds = 1.0
    rows = batch(drafter, 2)
    assert step(drafter, rows, [4, 2], successor).parts == [["free"] * 3, ["free"] * 2]


def test_counters_and_summary_of_parts_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = composite("merge", a=(Scripted(), False), b=(Forked(), True))
    assert (drafter.counters, drafter.summary) == ({}, [])
    monkeypatch.setattr(Scripted, "counters", {"hits": 2.0, "troubles/late": 1.0})
    monkeypatch.setattr(Forked, "counters", {"hits": 3.0})
    monkeypatch.setattr(Scripted, "summary", ["it learned"])
    assert drafter.counters == {"a.hits": 2.0, "a.troubles/late": 1.0, "b.hits": 3.0}
    assert drafter.summary == ["b: it learned", "a: it learned"]


def test_close_and_notes_reach_every_part() -> None:
    """A part that keeps its memory in a file would lose it."""
    parts = Scripted(), Scripted()
    drafter = composite("merge", a=(parts[0], False), b=(parts[1], True))
    drafter.close()
    assert all(p.closed for p in parts)
    assert drafter.notes == []


# ------------------------------------------------ heads, and texts that are still read


class Reading(Scripted):
    """Reads hidden states, and the texts of rows only where it may."""

    def __init__(self, layers: tuple[int, ...], unread: set[int] = frozenset()) -> None:
        super().__init__()
        self.layers = layers
        self.unread = unread
        self.read_of: list[tuple[int, int, tuple[int, ...]]] = []

    @property
    def signals(self) -> tuple[int, ...]:
        return self.layers

    def read(self, index: int, start: int, hidden: dict[int, torch.Tensor]) -> None:
        self.read_of.append((index, start, tuple(hidden)))

    def prepare(self, rows: Rows, gamma: list[int], budget: int) -> list[int]:
        return [0 if index in self.unread else count for index, count in enumerate(gamma)]

    def catch_up(self, rows: Rows, gamma: list[int]) -> None:
        self.caught_up = gamma

    def pack(self, index: int) -> str | None:
        return f"row {index}" if self.layers else None

    def unpack(self, state: str) -> None:
        self.unpacked = state


def test_every_part_hears_the_layers_it_asked_for_and_no_others() -> None:
    """A head that reads a layer more than it was trained with would draft nonsense."""
    one = Reading((1, 3))
    two = Reading((3, 5))
    deaf = Reading(())
    drafter = CompositeDrafter(
        [Part("one", one, True), Part("deaf", deaf, False), Part("two", two, False)], "merge"
    )
    assert drafter.signals == (1, 3, 5)
    drafter.read(2, 7, {layer: torch.zeros(4, 8) for layer in drafter.signals})
    assert (one.read_of, two.read_of, deaf.read_of) == ([(2, 7, (1, 3))], [(2, 7, (3, 5))], [])


@pytest.mark.parametrize("mode", ["merge", "best"])
def test_while_a_model_still_reads_a_text_the_others_draft_for_it(mode: str) -> None:
    """And only in the step that was prepared so: the next one asks the model again."""
    model = Reading((), unread={0})
    free = Scripted(jump=2, limit=3)
    drafter = CompositeDrafter([Part("model", model, True), Part("free", free, False)], mode)
    rows = batch(drafter, 2)
    assert drafter.prepare(rows, [4, 4], 256) == [4, 4]
    drafter.catch_up(rows, [4, 4])
    assert model.caught_up == [0, 4]
    draft = step(drafter, rows, [4, 4], successor)
    assert model.budgets[-1][0] == 0
    assert draft.lists[1][0] == 3
    model.unread = frozenset()
    for _ in range(TRY_AFTER + 2):
        drafter.prepare(rows, [4, 4], 256)
        step(drafter, rows, [4, 4], successor)
    assert any(budget[0] for budget in model.budgets[1:])


def test_what_a_row_knows_is_packed_part_by_part() -> None:
    """None where a part that reads hidden states keeps nothing: the caller then has the prompt read
    again."""
    head = Reading((1,))
    free = Scripted()
    drafter = CompositeDrafter([Part("head", head, True), Part("free", free, False)], "merge")
    state = drafter.pack(1)
    assert state == {"head": "row 1", "free": None}
    drafter.unpack(state)
    assert head.unpacked == "row 1"
    head.pack = lambda index: None  # type: ignore[method-assign]
    assert drafter.pack(1) is None


def test_the_head_of_a_part_is_named_among_its_options() -> None:
    """`--draft FOLDER` becomes the part's own option, and the others stay."""
    settings = CompositeSettings("suffix,eagle3", options="suffix.max_depth=9")
    required = CompositeDrafter.requirements(settings)
    assert (required.head, required.head_part, required.head_folder) == (True, "eagle3", None)
    named = CompositeDrafter.with_head(
        {"parts": settings.parts, "options": settings.options}, "eagle3", "/some/where"
    )
    settings = CompositeSettings(**named)
    assert CompositeDrafter.part_classes(settings)["suffix"][1].max_depth == 9
    required = CompositeDrafter.requirements(settings)
    assert required.head_folder == "/some/where"
    assert [(kind.kind, folder) for kind, folder in required.heads] == [("eagle3", "/some/where")]
    assert not CompositeDrafter.requirements(CompositeSettings("ngram,suffix")).head
    assert CompositeDrafter.with_head({}, "block", "x") == {"options": "block.head=x"}


# ------------------------------------------------ what is refused


def refused(**options: str) -> str:
    with pytest.raises(ConfigError) as error:
        choose_parts("composite", options, "auto", {}, None, lossy=False)
    return str(error.value)


@pytest.mark.parametrize("parts", ["ngram", "ngram,ngram", "ngram,", ""])
def test_at_least_two_different_parts(parts: str) -> None:
    assert "at least two different drafters" in refused(parts=parts)


@pytest.mark.parametrize("parts", ["composite,ngram", "ngram,none"])
def test_no_composite_of_composites(parts: str) -> None:
    assert "cannot contain" in refused(parts=parts)


def test_an_unknown_part_is_named_with_the_nearest() -> None:
    message = refused(parts="ngram,sufix")
    assert "sufix" in message
    assert "Did you mean 'suffix'" in message


def test_two_models() -> None:
    """Refused before either of them is loaded."""
    assert "one model or head at most, got draft-model and quantised" in refused(
        parts="draft-model,quantised"
    )
    assert "one model or head at most, got eagle3 and medusa" in refused(parts="eagle3,medusa")


def test_a_tree_of_equal_nodes() -> None:
    """Siblings drawn with replacement cannot share nodes; a row's own tree may have them."""
    options = {"parts": "eagle3,ngram", "options": "eagle3.tree=parallel:2"}
    assert "cannot draft parallel:2" in refused(**options)
    CompositeDrafter.part_classes(CompositeSettings(**options, mode="best"))


@pytest.mark.parametrize("mode", ["merge", "best"])
@pytest.mark.parametrize(("tree", "num_nodes"), [("best-first", 15), ("4x2x1", 20), ("2x1", 7)])
def test_a_models_tree_comes_whole(mode: str, tree: str, num_nodes: int) -> None:
    settings = CompositeSettings("eagle3,ngram", mode=mode, options=f"eagle3.tree={tree}")
    required = CompositeDrafter.requirements(settings)
    assert (required.trees, required.num_draft_tokens) == (True, num_nodes)


def test_options_of_a_part_that_is_not_there() -> None:
    assert "'suffix', which is not among the parts" in refused(
        parts="ngram,recycling", options="suffix.max_depth=3"
    )


def test_options_of_parts_are_checked_like_their_own() -> None:
    assert "Did you mean 'max_ngram'" in refused(parts="ngram,suffix", options="ngram.max_gram=3")
    assert "PART.NAME=VALUE" in refused(parts="ngram,suffix", options="max_ngram=3")
    assert "must be 'merge' or 'best'" in refused(mode="bst")


def test_options_reach_the_parts() -> None:
    settings = CompositeSettings("ngram, suffix", options="ngram.max-ngram=2; suffix.tree=true")
    classes = CompositeDrafter.part_classes(settings)
    assert classes["ngram"][1].max_ngram == 2
    assert classes["suffix"][1].tree is True
    assert not CompositeDrafter.requirements(settings).draft
    assert CompositeDrafter.requirements(CompositeSettings()).draft
    assert CompositeDrafter.requirements(CompositeSettings("quantised,ngram")).module
