"""From names and options to parts that fit one another: what is chosen, and what is refused before
any model is read."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.draft_length import AutoLength, FixedLength
from outrider.draft_length.length import AUTO_MAX_DRAFT_TOKENS, MAX_DRAFT_TOKENS, DraftLength
from outrider.drafters.requirements import DEFAULT_NUM_DRAFT_TOKENS
from outrider.errors import CapabilityError, ConfigError
from outrider.parts import Parts, choose_parts


def choose(
    drafter: str = "ngram", verifier: str = "auto", length: int | str | None = None, **options: Any
) -> Parts:
    lossy = options.pop("lossy", False)
    verifier_options = options.pop("verifier_options", {})
    return choose_parts(drafter, options, verifier, verifier_options, length, lossy=lossy)


# ------------------------------------------------ the verifier


def test_auto_takes_block_for_chains_and_traversal_for_trees() -> None:
    assert choose("ngram").make_verifier().name == "block"
    assert choose("ngram", tree=True).make_verifier().name == "traversal"
    assert choose("draft-model").make_verifier().name == "block"
    assert choose("draft-model", tree="2x2").make_verifier().name == "traversal"


@pytest.mark.parametrize("verifier", ["block", "token"])
def test_a_chain_verifier_refuses_trees_and_names_those_that_take_them(verifier: str) -> None:
    with pytest.raises(CapabilityError) as error:
        choose("recycling", verifier)
    message = str(error.value)
    assert f"verifier '{verifier}' takes chains, but drafter 'recycling' drafts trees" in message
    for name in ("traversal", "multi-round", "gumbel"):
        assert name in message


def test_a_tree_verifier_takes_chains() -> None:
    assert choose("ngram", "traversal").make_verifier().name == "traversal"


def test_lossy_verifiers_need_the_word() -> None:
    """Nothing may change what the model says unless it was asked for by name."""
    with pytest.raises(
        ConfigError, match=r"'typical' is lossy: .* --lossy \(lossy=True in Python\)"
    ):
        choose(verifier="typical")
    assert not choose(verifier="typical", lossy=True).make_verifier().lossless


@pytest.mark.parametrize("verifier", ["auto", "block"])
def test_lossy_with_a_lossless_verifier_would_be_an_ignored_option(verifier: str) -> None:
    with pytest.raises(ConfigError, match=r"verifier 'block' is lossless; lossy are: .*typical"):
        choose(verifier=verifier, lossy=True)


# ------------------------------------------------ names and options


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown drafter 'ngrams'. Did you mean 'ngram'"):
        choose("ngrams")
    with pytest.raises(ConfigError, match=r"unknown verifier 'traversl'. Did you mean 'traversal'"):
        choose(verifier="traversl")


def test_unknown_options_come_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"drafter 'ngram' has no option 'max_gram'. Did you mean 'max_ngram'"
    ):
        choose(max_gram=3)
    with pytest.raises(
        ConfigError, match=r"verifier 'block' has no option 'epsilon'. It has none."
    ):
        choose(verifier_options={"epsilon": 0.1})


def test_options_reach_both_parts() -> None:
    parts = choose(
        "ngram", "typical", lossy=True, max_ngram="3", verifier_options={"epsilon": "0.2"}
    )
    assert parts.drafter_settings.max_ngram == 3
    assert parts.verifier_settings.epsilon == 0.2


def test_what_a_part_needs_depends_on_its_settings() -> None:
    assert choose("draft-model").requirements.draft
    assert not choose("ngram").requirements.draft
    assert choose("composite").requirements.draft
    assert not choose("composite", parts="ngram,suffix").requirements.draft


# ------------------------------------------------ how many draft tokens


@pytest.mark.parametrize(
    ("asked", "default", "expected"),
    [
        (None, 5, DraftLength(5)),
        (7, 5, DraftLength(7)),
        ("7", 5, DraftLength(7)),
        ("auto", 5, DraftLength(AUTO_MAX_DRAFT_TOKENS, is_auto=True)),
        ("auto", 24, DraftLength(24, is_auto=True)),
        ("auto:12", 5, DraftLength(12, is_auto=True)),
        ("auto:1", 5, DraftLength(1, is_auto=True)),
        (MAX_DRAFT_TOKENS, 5, DraftLength(MAX_DRAFT_TOKENS)),
    ],
)
def test_forms_of_a_length(asked: int | str | None, default: int, expected: DraftLength) -> None:
    assert DraftLength.parse(asked, default) == expected


@pytest.mark.parametrize("asked", ["many", "auto:", "auto:x", "autos", "5:3", "", "1.5", "auto:-"])
def test_anything_else_is_no_length(asked: str) -> None:
    with pytest.raises(ConfigError, match="must be a number, 'auto' or 'auto:N', got"):
        DraftLength.parse(asked, 5)


@pytest.mark.parametrize(
    "asked", [0, -1, "0", MAX_DRAFT_TOKENS + 1, "auto:0", "auto:65", "auto:-3"]
)
def test_lengths_out_of_range(asked: int | str) -> None:
    with pytest.raises(ConfigError, match=f"between 1 and {MAX_DRAFT_TOKENS}"):
        DraftLength.parse(asked, 5)


def test_a_number_fixes_and_auto_frees_the_length() -> None:
    fixed = choose(length=3).make_control()
    free = choose(length="auto:12").make_control()
    assert (type(fixed), fixed.gamma) == (FixedLength, 3)
    assert isinstance(free, AutoLength)
    assert [one.max_nodes for one in free.drafters.values()] == [12]


def test_without_a_number_the_drafter_decides() -> None:
    assert choose("ngram").length == DraftLength(DEFAULT_NUM_DRAFT_TOKENS)
    assert choose("composite", parts="ngram,suffix").length == DraftLength(7)


def test_auto_knows_trees_from_chains() -> None:
    """A node of a chain that was kept tells how many must be asked for to get it; a tree's does
    not."""
    assert choose("recycling", length="auto:40").make_goodput()._trees
    assert not choose("ngram", length="auto:12").make_goodput()._trees


def test_a_compiled_loop_is_as_long_as_the_length_is_fixed() -> None:
    """A loop of five tokens would pay for five where auto wants one."""
    assert choose("draft-model", length=4).loop_lengths == (4,)
    assert choose("draft-model", length="auto").loop_lengths == (8, 5, 3, 2, 1)
    assert choose("ngram", length=4).loop_lengths == ()
