"""`LLM.generate`, `chat` and `stream` as vLLM's users call them: all forms of prompts, several
answers, the model's defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.build import Options
from outrider.engine.engine import make_engine
from outrider.engine.request import Request
from outrider.errors import ConfigError, RequestError
from outrider.sampling.params import SamplingParams
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama
from tests.unit.engine.conftest import Answer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if shout %}!{% endif %}"
    "{% if tools %}[{{ tools | length }}]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
FILE = {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 7, "num_beams": 4}
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.pad_token = "<|end|>"
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder, tiny_llama(257, max_position_embeddings=64), tokenizer)
    own = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(own | FILE))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, drafter="prediction")


@pytest.mark.slow
def test_what_a_tokenizer_returns_is_continued(llm: LLM) -> None:
    """Catches the keys of a BatchEncoding taken for prompts, and padding fed as text."""
    texts = ["abc", "h"]
    plain = [done.token_ids for done in llm.generate(texts, SHORT)]
    encoded = llm.tokenizer(texts, padding=True, return_tensors="pt")
    assert [done.token_ids for done in llm.generate(encoded, SHORT)] == plain
    fed = [done.prompt_token_ids for done in llm.generate(encoded, SHORT)]
    assert fed == [llm.tokenizer(text)["input_ids"] for text in texts]
    vllm = [{"prompt": "abc"}, {"prompt_token_ids": llm.tokenizer("h")["input_ids"]}]
    assert [done.token_ids for done in llm.generate(vllm, SHORT)] == plain
    assert [done.prompt for done in llm.generate(vllm, SHORT)] == ["abc", None]
    last = list(llm.stream(llm.tokenizer("abc", return_tensors="pt"), SHORT))[-1]
    assert last.completion is not None
    assert last.completion.token_ids == plain[0]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1, 2], [3, 257]], "prompt 1 has token id 257, outside the vocabulary of 257"),
        ([-1], "prompt 0 has token id -1"),
        (["a", None], "prompt 1 is None"),
        (["a", ""], "prompt 1 is empty"),
        ({"input_ids": [5, 6], "attention_mask": [0, 0]}, "prompt 0 is empty"),
    ],
)
def test_a_bad_prompt_is_named(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, SHORT)


def test_stream_takes_one_prompt(llm: LLM) -> None:
    with pytest.raises(
        RequestError, match="stream takes one prompt, got 2: generate takes several"
    ):
        llm.stream(["a", "b"], SHORT)
    with pytest.raises(RequestError, match="the prompt has token id -1"):
        next(llm.stream([-1], SHORT))
    with pytest.raises(ConfigError, match="stream makes one answer, got n=2"):
        llm.stream("a", SamplingParams(n=2))


def test_predictions_take_the_same_forms(llm: LLM) -> None:
    """Catches a prediction that is read as another one: all forms of the right one are accepted as
    drafts."""
    answer = llm.generate("abc", SHORT)[0]
    for form in (
        answer.token_ids,
        [answer.token_ids],
        {"prompt_token_ids": answer.token_ids},
        {"input_ids": [answer.token_ids]},
    ):
        again = llm.generate("abc", SHORT, prediction=form)[0]
        assert again.token_ids == answer.token_ids
        assert again.stats.accepted >= 5
    with pytest.raises(RequestError, match="prediction 0 is 1"):
        llm.generate("abc", SHORT, prediction=1.5)


@pytest.mark.parametrize("given", [{"temperature": 1}, 5, [SHORT, "x"], "greedy"])
def test_sampling_params_of_another_kind_are_refused(llm: LLM, given: Any) -> None:
    with pytest.raises(ConfigError, match="sampling_params must be SamplingParams, or a list"):
        llm.generate(["a", "b"], given)


def test_n_makes_several_answers(llm: LLM) -> None:
    """Answer i of a seeded request is that of seed + i; the first one's text stays at the top."""
    sampled = SamplingParams(temperature=1.0, seed=2**64 - 2, max_tokens=8, ignore_eos=True, n=3)
    first, second = llm.generate(["abc", "h"], [sampled, SHORT])
    seeds = (2**64 - 2, 2**64 - 1, 0)
    alone = [
        llm.generate("abc", SamplingParams(temperature=1.0, seed=s, max_tokens=8, ignore_eos=True))[
            0
        ]
        for s in seeds
    ]
    assert [one.token_ids for one in first.outputs] == [one.token_ids for one in alone]
    assert [one.index for one in first.outputs] == [0, 1, 2]
    assert tuple(one.seed for one in first.outputs) == seeds
    assert first.text == first.outputs[0].text
    assert len({one.text for one in first.outputs}) == 3
    assert [one.prompt for one in first.outputs] == ["abc"] * 3
    assert [one.text for one in second.outputs] == [second.text]
    unseeded = llm.generate(
        "abc", SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, n=2)
    )[0]
    assert len({one.seed for one in unseeded.outputs}) == 2


def test_no_limit_ends_with_the_context(llm: LLM) -> None:
    """`max_tokens=None` is vLLM's: prompt and answer fill the context."""
    done = llm.generate("abc", SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert len(done.prompt_token_ids) + len(done.token_ids) == 64
    assert done.finish_reason == "length"


def test_calls_without_parameters_follow_the_model(llm: LLM) -> None:
    """The file's sampling holds where nothing was given, and nowhere else."""
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_p, defaults.max_tokens) == (0.6, 0.95, 7)
    assert len(llm.generate("abc")[0].token_ids) <= 7
    assert len({llm.generate("abc")[0].text for _ in range(6)}) > 1
    longer = llm.generate("abc", SamplingParams(max_tokens=9, ignore_eos=True))[0].token_ids
    assert longer[:8] == llm.generate("abc", SHORT)[0].token_ids, "greedy, as SamplingParams says"
    assert (
        "sampling defaults from generation_config.json: temperature 0.6, top_p 0.95, max_tokens 7"
        in " ".join(llm.notes)
    )
    assert (
        "generation_config.json asks for num_beams=4: not supported here and ignored" in llm.notes
    )


def test_the_model_s_settings_can_be_left_out(folder: Path, tmp_path: Path) -> None:
    plain = LLM(folder, drafter="ngram", generation_config="none")
    assert plain.get_default_sampling_params() == SamplingParams()
    assert not any("generation_config" in note for note in plain.notes)
    assert plain.sampling_defaults.unused.endswith(
        "asks for temperature 0.6, top_p 0.95, max_tokens 7, num_beams=4"
    )
    (tmp_path / "generation_config.json").write_text('{"top_k": 5}')
    other = LLM(folder, drafter="ngram", generation_config=str(tmp_path))
    assert other.get_default_sampling_params() == SamplingParams(top_k=5, temperature=1.0)
    with pytest.raises(
        ConfigError, match="generation_config must be auto, none or a folder with generation_config"
    ):
        LLM("no such folder", generation_config="vllm")


def test_chat_renders_with_the_template(llm: LLM) -> None:
    """One conversation or several, and vLLM's arguments about the template."""
    encode = lambda text: llm.tokenizer(text)["input_ids"]  # noqa: E731
    assert llm.chat(HI, SHORT)[0].prompt_token_ids == encode("<user>Hi<assistant>")
    several = llm.chat(
        [HI, [*HI, {"role": "assistant", "content": "Yo"}]], SHORT, continue_final_message=False
    )
    rendered = [encode("<user>Hi<assistant>"), encode("<user>Hi<assistant>Yo<assistant>")]
    assert [done.prompt_token_ids for done in several] == rendered
    begun = [
        *HI,
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Y"}, {"type": "text", "text": "o"}],
        },
    ]
    assert llm.chat(begun, SHORT, continue_final_message=True)[0].prompt_token_ids == encode(
        "<user>Hi<assistant>Yo"
    )
    assert llm.chat(HI, SHORT, add_generation_prompt=False)[0].prompt_token_ids == encode(
        "<user>Hi"
    )
    assert llm.chat_prompt(HI, chat_template_kwargs={"shout": True}) == encode(
        "<user>Hi!<assistant>"
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert llm.chat_prompt(HI, tools=[tool]) == encode("<user>Hi[1]<assistant>")
    assert llm.chat_prompt(HI, chat_template="{{ messages[0].content }}") == encode("Hi")
    assert llm.chat(HI, SHORT)[0].token_ids == llm.generate(llm.chat_prompt(HI), SHORT)[0].token_ids
    assert len(llm.chat(HI)[0].token_ids) <= 7, "the model's defaults hold in chats"


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ("Hi", {}, "messages must be a list of messages like"),
        (HI[0], {}, "messages must be a list"),
        ([], {}, "chat_prompt takes one conversation, got 0"),
        ([[]], {}, "conversation 0 has no messages"),
        ([HI[0], "x"], {}, "conversation 0 must be a list of messages"),
        ([{"content": "Hi"}], {}, "message 0 of conversation 0 needs a 'role'"),
        ([{"role": "user"}], {}, "message 0 of conversation 0 needs 'content'"),
        (
            [{"role": "user", "content": 5}],
            {},
            "the content of message 0 of conversation 0 must be text, got int",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            {},
            "a part of type 'image_url'; models are given text only",
        ),
        (
            [{"role": "user", "content": "\ud800"}],
            {},
            "the content of message 0 of conversation 0 is not UTF-8 text",
        ),
        (
            HI,
            {"continue_final_message": True, "add_generation_prompt": True},
            "contradict each other",
        ),
        (HI, {"chat_template_kwargs": {"sing": True}}, "knows no 'sing'"),
        (HI, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs cannot set tools"),
        (
            HI,
            {"chat_template": "{{ messages[9].content.x }}"},
            "the chat template refused the messages",
        ),
    ],
)
def test_conversations_that_are_none_are_refused(
    llm: LLM, messages: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((RequestError, ConfigError)) as error:
        llm.chat_prompt(messages, **options)
    assert message in str(error.value)


def test_an_engine_request_is_one_answer(folder: Path) -> None:
    """Catches `n` accepted by the engine and ignored, and answers other than those that `LLM` gives
    for the same seeds."""
    engine = make_engine(Options(str(folder), drafter="ngram"))
    assert engine.sampling_defaults.values["top_p"] == 0.95
    assert any("top_p 0.95" in note for note in engine.notes)
    engine.start()
    asked = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True, n=3)
    try:
        answers = [Answer() for _ in range(3)]
        for number, answer in enumerate(answers):
            engine.submit(
                Request(id=str(number), prompt=[70, 71], params=asked.answer(number)), answer
            )
        coupled = LLM(folder, drafter="ngram").generate([70, 71], asked)[0]
        assert [one.token_ids for one in coupled.outputs] == [
            answer.token_ids for answer in answers
        ]
        with pytest.raises(ConfigError, match="n must be 1 where one answer is made, got 2"):
            engine.submit(
                Request(id="a", prompt=[5], params=SamplingParams(n=2)), lambda update: None
            )
    finally:
        engine.stop()
