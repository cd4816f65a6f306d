"""How models write down what they think. A format is known by the model's chat template, else by
its vocabulary.

    think      <think> ... </think>                          DeepSeek R1, Qwen3, GLM 4.5, SmolLM3, Nemotron, most others
    mistral    [THINK] ... [/THINK]                          Magistral
    gemma4     <|channel>thought ... <channel|>              Gemma 4
    seed_oss   <seed:think> ... </seed:think>                Seed-OSS
    cohere     <|START_THINKING|> ... <|END_THINKING|>       Command A Reasoning
    apertus    <|inner_prefix|> ... <|inner_suffix|>         Apertus
    granite    Here is my thought process: ... Here is my response:      Granite 3.2 and 3.3
    harmony    <|channel|>analysis<|message|> ... <|end|>, then <|channel|>final<|message|> ...      gpt-oss

`--reasoning-parser` takes these names, and vLLM's for the same formats.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from outrider.errors import ConfigError, did_you_mean

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True)
class ReasoningFormat:
    """One way to write thoughts."""

    name: str
    opening: tuple[str, ...]
    closing: tuple[str, ...]  # of harmony: how the answer itself begins
    label: str = ""  # a word after the opening mark that is no thought
    signs: tuple[str, ...] = ()  # what a template that uses it holds; empty: its closing mark
    needs_tokens: bool = True  # its marks are tokens, which text does not show
    is_harmony: bool = False  # messages in channels, instead of one pair of marks


THINK = ReasoningFormat("think", ("<think>",), ("</think>",), needs_tokens=False)
MISTRAL = ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",))
GEMMA4 = ReasoningFormat("gemma4", ("<|channel>",), ("<channel|>",), label="thought")
SEED_OSS = ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",), needs_tokens=False)
COHERE = ReasoningFormat("cohere", ("<|START_THINKING|>",), ("<|END_THINKING|>",))
APERTUS = ReasoningFormat("apertus", ("<|inner_prefix|>",), ("<|inner_suffix|>",))
GRANITE = ReasoningFormat(
    "granite",
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    needs_tokens=False,
)
HARMONY = ReasoningFormat(
    "harmony",
    ("<|channel|>",),
    ("<|channel|>final<|message|>",),
    signs=("<|channel|>", "<|message|>"),
    is_harmony=True,
)
# in this order
FORMATS = {
    one.name: one for one in (HARMONY, MISTRAL, GEMMA4, SEED_OSS, COHERE, APERTUS, GRANITE, THINK)
}
SAME = dict.fromkeys(
    (
        "deepseek_r1", "deepseek_v3", "deepseek_v4", "qwen3", "glm45", "glm47", "kimi_k2", "minimax_m2", "mimo", "nemotron_v3",
        "olmo3", "step3", "holo2",
    ), THINK,
) | {"openai_gptoss": HARMONY, "cohere_command3": COHERE}  # fmt: skip
NAMES = (AUTO, NONE, *FORMATS, *SAME)


def check_name(name: str) -> None:
    """Raises ConfigError for a parser that is not known here."""
    if name not in NAMES:
        raise ConfigError(f"unknown reasoning parser '{name}'.{did_you_mean(name, NAMES)}")


def format_of(name: str, template: str, tokens: Collection[str]) -> ReasoningFormat | None:
    """The format called `name`; with "auto" the one a template shows or a vocabulary has tokens
    for. `tokens`: those that were added to the vocabulary. Raises ConfigError for a name that is
    unknown, or that this model cannot have."""
    check_name(name)
    if name == AUTO:
        shown = (
            marks
            for marks in FORMATS.values()
            if all(sign in template for sign in marks.signs or marks.closing[:1])
        )
        added = (
            marks
            for marks in FORMATS.values()
            if not marks.signs and {marks.opening[0], marks.closing[0]} <= set(tokens)
        )
        return next(shown, None) or next(added, None)
    known_format = FORMATS.get(name) or SAME.get(name)
    if (
        known_format is not None
        and known_format.needs_tokens
        and known_format.opening[0] not in tokens
    ):
        raise ConfigError(
            f"reasoning parser '{name}': this model's tokenizer has no token "
            f"'{known_format.opening[0]}'; use 'auto'"
        )
    return known_format
