"""How models write tool calls. A format is known by what the model's chat template shows.

    hermes       <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>    Hermes, Qwen 2.5 and 3
    qwen3-coder  <tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>...    Qwen3-Coder, Qwen 3.5
    glm          <tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>... GLM 4.5 to 4.7, these without line ends
    deepseek     <calls begin><call begin>f<sep>{...}<call end><calls end>       DeepSeek V3, R1 and V3.1, in tokens of its own
    mistral      [TOOL_CALLS][{"name": "f", "arguments": {...}}]                 Mistral, with [ARGS] as well: f[ARGS]{...}
    llama3       {"name": "f", "parameters": {...}}                              Llama 3.1 to 3.3, in place of an answer
    pythonic     [f(a=1, b="x"), g()]                                            Llama 4 and others, in place of an answer
    harmony      <|channel|>commentary to=functions.f<|message|>{...}<|call|>    gpt-oss, read by `HarmonyReader`

All that reading and grammars need to know of one is in `ToolFormat`.
"""

from __future__ import annotations

import re
import secrets
import string
from dataclasses import dataclass, replace

from outrider.errors import CapabilityError, ConfigError, did_you_mean
from outrider.serve.tools.text import half

LETTERS = string.ascii_letters + string.digits
PYTHON_TAG = "<|python_tag|>"
WORD = "[A-Za-z0-9_.-]"  # letters of a function's name
# DeepSeek's own letters
CALLS = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
SEP = "<｜tool▁sep｜>"
CALL_END = "<｜tool▁call▁end｜>"


@dataclass(frozen=True)
class CallHead:
    """The way from a mark to the `{` of the arguments, where the function's name stands outside of
    the JSON."""

    whole: re.Pattern[str]  # group 1: the name
    part: re.Pattern[str]  # what may still become one


@dataclass(frozen=True)
class Tags:
    """A call whose arguments stand between tags, one by one: texts as they are, everything else as
    JSON."""

    name: tuple[str, str]  # before and after the function's name
    key: tuple[str, str]
    value: tuple[str, str]
    end: str  # of the call
    # what ends a value, too: some models forget its tag, and their own parsers allow for it
    also_end: tuple[str, ...] = ()
    gap: str = "\n"  # as templates write it between tags
    lined: bool = False  # a line end just inside of a value, at either end, belongs to the tags

    @property
    def ends(self) -> tuple[str, ...]:
        """The end of a value."""
        return (self.value[1], *self.also_end)


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls."""

    name: str
    opening: str  # text a call begins with; "": the whole answer is calls, or none
    closing: str = ""  # "": nothing follows calls but calls
    around: tuple[str, ...] = ()  # what else may stand around the JSON of a call
    head: CallHead | None = None
    tags: Tags | None = None
    arguments: str = "arguments"  # the key
    id_length: int = 24  # Mistral's templates take nine letters and nothing else
    is_fenced: bool = False  # DeepSeek before V3.1: "function<sep>f\n```json\n{...}\n```"
    has_args: bool = False  # f[ARGS]{...}
    is_harmony: bool = False  # messages in channels: calls are never enforced

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens."""
        marks = {
            "deepseek": (CALLS, CALLS_END, CALL, SEP, CALL_END),
            "mistral": ("[TOOL_CALLS]", "[ARGS]"),
            "llama3": (PYTHON_TAG,),
        }
        tags = () if self.tags is None else (*self.tags.key, *self.tags.value)
        return marks.get(
            self.name, tuple(text for text in (self.opening, self.closing, *tags) if len(text) > 1)
        )

    def new_id(self) -> str:
        letters = "".join(secrets.choice(LETTERS) for _ in range(self.id_length))
        return letters if self.name == "mistral" else f"call_{letters}"


ARGS_HEAD = CallHead(
    re.compile(rf"({WORD}+)(?:\[ARGS\])?(?=\{{)"), re.compile(rf"{WORD}+{half('[ARGS]')}")
)
SEP_HEAD = CallHead(
    re.compile(rf"(?:function{SEP})?({WORD}+)(?:{SEP})?\s*(?:```json)?\s*(?=\{{)"),
    re.compile(
        rf"(?:function{SEP})?{WORD}*(?:{half(SEP)}|(?:{SEP})?\s*(?:{half('```json')}|```json\s*))"
    ),
)
QWEN_TAGS = Tags(
    ("<function=", ">"),
    ("<parameter=", ">"),
    ("", "</parameter>"),
    "</function>",
    ("<parameter=", "</function>"),
    lined=True,
)
GLM_TAGS = Tags(
    ("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "</tool_call>"
)

HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
QWEN3_CODER = ToolFormat("qwen3-coder", "<tool_call>", "</tool_call>", tags=QWEN_TAGS)
GLM = ToolFormat("glm", "<tool_call>", "</tool_call>", tags=GLM_TAGS)
GLM_TIGHT = replace(GLM, tags=replace(GLM_TAGS, gap=""))
DEEPSEEK = ToolFormat("deepseek", CALLS, CALLS_END, (CALL, CALL_END, "```"), SEP_HEAD)
DEEPSEEK_FENCED = replace(DEEPSEEK, is_fenced=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", head=ARGS_HEAD, id_length=9)
MISTRAL_ARGS = replace(MISTRAL, has_args=True)
LLAMA3 = ToolFormat("llama3", "", arguments="parameters")
PYTHONIC = ToolFormat("pythonic", "")
HARMONY = ToolFormat("harmony", "", is_harmony=True)
# not HARMONY: no grammar
FORMATS = {
    form.name: form for form in (HERMES, QWEN3_CODER, GLM, DEEPSEEK, MISTRAL, LLAMA3, PYTHONIC)
}


def format_of(template: str, name: str | None = None) -> ToolFormat:
    """The format called `name`, or the one a chat template shows. Raises ConfigError,
    CapabilityError."""
    if name is not None and name not in FORMATS:
        raise ConfigError(f"unknown tool format '{name}'.{did_you_mean(name, FORMATS)}")
    form = _shown(template) if name is None else FORMATS[name]
    if form is None:
        raise CapabilityError(
            "tools: this model's chat template shows none of the ways to write a call that are "
            "known here "
            f"({', '.join(FORMATS)}, harmony), so its calls could not be read back"
        )
    return _variant(form, template)


def _shown(template: str) -> ToolFormat | None:
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|channel|>" in template and "to=functions" in template:
        return HARMONY
    if SEP in template:
        return DEEPSEEK
    if "<tool_call>" in template and "<arg_key>" in template:
        return GLM
    if "<tool_call>" in template and "<parameter=" in template:
        return QWEN3_CODER
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if "func_name1(" in template:
        return PYTHONIC
    return LLAMA3 if PYTHON_TAG in template or '"parameters": dictionary' in template else None


def _variant(form: ToolFormat, template: str) -> ToolFormat:
    """Models of one family differ in small things."""
    if form is MISTRAL and "[ARGS]" in template:
        return MISTRAL_ARGS
    if form is GLM and "</arg_key><arg_value>" in template:
        return GLM_TIGHT
    return DEEPSEEK_FENCED if form is DEEPSEEK and "```json" in template else form
