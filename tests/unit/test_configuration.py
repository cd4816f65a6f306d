"""Configurations as text: what is read, what is written, what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.configuration import Configuration, parse_configurations
from outrider.errors import CapabilityError, ConfigError
from outrider.options import Options

NAMES = st.sampled_from(["tree", "max_depth", "stop", "parts"])
VALUES = st.text(st.characters(categories=("Ll", "Nd")), min_size=1, max_size=6)


def test_every_word_finds_its_field() -> None:
    found = Configuration.parse(
        " draft-model  k=8 tree=sequoia verifier=multi-round verifier.strict=yes "
    )
    assert found == Configuration(
        "draft-model", 8, {"tree": "sequoia"}, "multi-round", {"strict": "yes"}
    )


def test_auto_lengths_stay_words() -> None:
    assert Configuration.parse("suffix k=auto:12").num_draft_tokens == "auto:12"


def test_a_plus_stands_for_a_comma_inside_a_value() -> None:
    (found,) = parse_configurations(["composite parts=draft-model+suffix"])
    assert found.drafter_options == {"parts": "draft-model,suffix"}
    assert found.label == "composite parts=draft-model+suffix"


@given(
    st.sampled_from(["ngram", "draft-model"]),
    st.none() | st.integers(1, 64) | st.sampled_from(["auto", "auto:9"]),
    st.dictionaries(NAMES, VALUES),
    st.sampled_from(["auto", "block"]),
    st.dictionaries(NAMES, VALUES),
)
def test_the_label_is_read_back(
    drafter: str,
    length: int | str | None,
    options: dict[str, str],
    verifier: str,
    more: dict[str, str],
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
        ("", "begins with a drafter's name"),
        ("k=5", "begins with a drafter's name"),
        ("ngram k", "not NAME=VALUE"),
        ("ngram k=", "not NAME=VALUE"),
        ("ngram =5", "not NAME=VALUE"),
        ("none k=5", "leave k out"),
    ],
)
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
        "drafter": "ngram",
        "num_draft_tokens": 3,
        "drafter_options": {},
        "verifier": "token",
        "verifier_options": {},
    }


def test_what_is_given_besides_is_added() -> None:
    """One text, and num_draft_tokens and the like for what it leaves open."""
    found = Configuration.parse("suffix max_depth=32").with_more(6, {"alpha": 2}, "token", {})
    assert found == Configuration("suffix", 6, {"max_depth": "32", "alpha": 2}, "token")
    for more, message in (
        ((5, {}, "auto", {}), r"k \(num_draft_tokens\)"),
        ((None, {"tree": "4"}, "auto", {}), "tree"),
        ((None, {}, "block", {}), "verifier"),
        ((None, {}, "auto", {"epsilon": 1}), "verifier.epsilon"),
    ):
        with pytest.raises(
            ConfigError, match=f"given twice, .* and besides: {message}; leave one out"
        ):
            Configuration.parse(
                "draft-model k=3 tree=2 verifier=typical verifier.epsilon=0.2"
            ).with_more(*more)


def test_a_path_keeps_its_plus_and_its_comma() -> None:
    """Catches a corpus in a folder c++ that is looked for in c,,."""
    found = Configuration.parse("retrieval corpus=/code/c++/a,b.txt")
    assert found.drafter_options == {"corpus": "/code/c++/a,b.txt"}
    assert Configuration.parse(found.label) == found


def test_values_with_spaces_are_quoted() -> None:
    text = "retrieval 'corpus=/my texts/a.txt' k=4"
    found = Configuration.parse(text)
    assert found.drafter_options == {"corpus": "/my texts/a.txt"}
    assert Configuration.parse(found.label) == found
    for wrong, message in (
        ("suffix 'x=1", "quotes that do not close"),
        ("suffix k=1 k=2", "two values for 'k'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Configuration.parse(wrong)


def test_options_take_the_text_form() -> None:
    """Of Python, settings files and TOML alike."""
    options = Options("demo", drafter="suffix k=auto:12 max_depth=32 verifier=token")
    assert (options.drafter, options.num_draft_tokens, options.verifier) == (
        "suffix",
        "auto:12",
        "token",
    )
    assert options.drafter_options == {"max_depth": "32"}
    with pytest.raises(ConfigError, match="given twice"):
        Options("demo", drafter="suffix k=4 max_depth=32", num_draft_tokens=5)
