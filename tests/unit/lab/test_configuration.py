"""Configurations as text: what is read, what is written, what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import CapabilityError, ConfigError
from outrider.lab.configuration import Configuration, parse_configurations

NAMES = st.sampled_from(["tree", "max_depth", "stop", "parts"])
VALUES = st.text(st.characters(categories=("Ll", "Nd")), min_size=1, max_size=6)


def test_every_word_finds_its_field() -> None:
    found = Configuration.parse(" draft-model  k=8 tree=sequoia verifier=multi-round verifier.strict=yes ")
    assert found == Configuration("draft-model", 8, {"tree": "sequoia"}, "multi-round", {"strict": "yes"})


def test_auto_lengths_stay_words() -> None:
    assert Configuration.parse("suffix k=auto:12").num_draft_tokens == "auto:12"


def test_a_plus_stands_for_a_comma_inside_a_value() -> None:
    (found,) = parse_configurations(["composite parts=draft-model+suffix"])
    assert found.drafter_options == {"parts": "draft-model,suffix"}
    assert found.label == "composite parts=draft-model+suffix"


@given(
    st.sampled_from(["ngram", "draft-model"]), st.none() | st.integers(1, 64) | st.sampled_from(["auto", "auto:9"]),
    st.dictionaries(NAMES, VALUES), st.sampled_from(["auto", "block"]), st.dictionaries(NAMES, VALUES),
)  # fmt: skip
def test_the_label_is_read_back(
    drafter: str, length: int | str | None, options: dict[str, str], verifier: str, more: dict[str, str]
) -> None:
    """Journals and results name configurations by their labels."""
    one = Configuration(drafter, length, options, verifier, more)
    assert Configuration.parse(one.label) == one


def test_a_list_has_no_doubles_and_keeps_its_order() -> None:
    found = parse_configurations(["suffix, ngram k=3", "ngram k=03,none"])
    assert [one.label for one in found] == ["suffix", "ngram k=3", "none"]
    assert [one.is_plain for one in found] == [False, False, True]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "begins with a drafter's name"), ("k=5", "begins with a drafter's name"), ("ngram k", "not NAME=VALUE"),
        ("ngram k=", "not NAME=VALUE"), ("ngram =5", "not NAME=VALUE"), ("none k=5", "leave k out"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Configuration.parse(text)


def test_parts_check_names_and_combinations() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'ngram'"):
        Configuration.parse("ngran").parts()
    with pytest.raises(ConfigError, match="must be a number"):
        Configuration.parse("ngram k=many").parts()
    with pytest.raises(CapabilityError, match="takes chains"):
        Configuration.parse("draft-model tree=4x2 verifier=block").parts()


def test_as_dict_holds_arguments_of_llm() -> None:
    assert Configuration.parse("ngram k=3 verifier=token").as_dict() == {
        "drafter": "ngram", "num_draft_tokens": 3, "drafter_options": {}, "verifier": "token", "verifier_options": {},
    }  # fmt: skip
