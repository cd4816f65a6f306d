"""From a log of text to token ids, and tokenizers without models."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.demo import demo_paths
from outrider.errors import CheckpointError, ConfigError
from outrider.lab.replay.loop import load_text_target
from outrider.lab.replay.texts import Text, read_log
from outrider.lab.workload.types import Workload, WorkloadRequest
from tests.helpers import EOS, byte_tokenizer, save_checkpoint, tiny_llama, widened, word_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def workload(*requests: WorkloadRequest) -> Workload:
    return Workload("a log", requests)


def test_prompts_and_answers() -> None:
    """Catches special tokens inside of a text, a lost task or id, and an end token where the answer
    was cut."""
    tokenizer = word_tokenizer(20)
    log = read_log(
        workload(
            WorkloadRequest("a", prompt="w1 w2", answer="w3 w4", task="code"),
            WorkloadRequest("b", prompt="w1", answer="w3 w4 w5", max_tokens=3),
            WorkloadRequest("c", prompt="w1", answer="w3 w4 w5", max_tokens=8),
        ),
        tokenizer,
    )
    assert log.texts == [
        Text([1, 2], [3, 4, EOS], "code", "a", None),
        Text([1], [3, 4, 5], "other", "b", 3),
        Text([1], [3, 4, 5, EOS], "other", "c", None),
    ]
    assert log.skipped == []


def test_an_answer_is_the_same_tokens_behind_its_prompt() -> None:
    """Catches a space that the tokenizer puts before every text: the demo's does."""
    target = load_text_target(str(demo_paths().target))
    prompt = "Question: Sam has 3 lemons.\nAnswer:"
    answer = " Sam has 3 lemons.\nSo there are 3."
    (text,) = read_log(
        workload(WorkloadRequest("a", prompt=prompt, answer=answer)), target.tokenizer
    ).texts
    whole = target.tokenizer(prompt + answer)["input_ids"]
    assert [*text.prompt, *text.answer] == [*whole, target.tokenizer.eos_token_id]


def test_conversations_need_a_template() -> None:
    """Catches messages that are fed without it, and an answer that is asked for twice."""
    tokenizer = byte_tokenizer()
    request = WorkloadRequest("a", messages=({"role": "user", "content": "hi"},), answer="ho")
    with pytest.raises(ConfigError, match="no chat template"):
        read_log(workload(request), tokenizer)
    (plain,) = read_log(workload(request), tokenizer, chat_template=False).texts
    assert tokenizer.decode(plain.prompt) == "hi"
    tokenizer.chat_template = TEMPLATE
    (text,) = read_log(workload(request), tokenizer).texts
    assert tokenizer.decode(text.prompt) == "user: hi\nassistant: "
    assert tokenizer.decode(text.answer) == "ho<|end|>"


def test_requests_without_answers() -> None:
    """Catches prompts alone that count as texts, and a refusal that does not say which."""
    asked = WorkloadRequest("asked", prompt="w1")
    answered = WorkloadRequest("answered", prompt="w1", answer="w2")
    with pytest.raises(
        ConfigError, match=r"1 of 2 requests.*\n.*asked: has no answer\.\n.*--reading on_bad=skip"
    ):
        read_log(workload(asked, answered), word_tokenizer(20))
    log = read_log(workload(asked, answered), word_tokenizer(20), on_bad="skip")
    assert [text.id for text in log.texts] == ["answered"]
    assert log.skipped == ["asked: has no answer"]
    with pytest.raises(ConfigError, match="needs the answers"):
        read_log(workload(asked), word_tokenizer(20), on_bad="skip")


def test_a_tokenizer_is_enough(tmp_path: Path) -> None:
    """Catches weights that are read, and a vocabulary smaller than the model's: files of drafters
    are tied to it."""
    word_tokenizer(20).save_pretrained(tmp_path / "alone")
    assert load_text_target(str(tmp_path / "alone")).lm.shape.vocab_size == 20
    folder = save_checkpoint(tmp_path / "padded", widened(tiny_llama(20), 24), word_tokenizer(20))
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    target = load_text_target(str(folder))
    assert (target.lm.shape.vocab_size, target.name) == (24, str(folder))
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        load_text_target(str(tmp_path))
