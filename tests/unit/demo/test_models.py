"""The committed pair is the pair that was measured."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider import LLM, SamplingParams
from outrider.demo import demo_paths
from outrider.demo.packed import PACKED, WEIGHTS
from tools.demo_models import corpus, tokenizer
from tools.demo_models.evaluate import chain_tau, greedy_tokens
from tools.demo_models.problems import is_correct, problems

MODELS = demo_paths().draft.parent
HEADS = MODELS / "heads"
MAX_BYTES = 23.5e6
MAX_HEAD_BYTES = 15e6

_HAS_PAIR = (MODELS / "evaluation.json").exists()
pytestmark = pytest.mark.skipif(not _HAS_PAIR, reason="the pair is not in this checkout")


def size_of(folder: Path) -> int:
    """Bytes of what is tracked: weights that lie packed beside them do not count unpacked."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(
        path.stat().st_size
        for path in files
        if path.name != WEIGHTS or path.with_name(PACKED) not in files
    )


def test_folders_stay_small() -> None:
    assert size_of(HEADS) <= MAX_HEAD_BYTES
    assert size_of(MODELS / "target") + size_of(MODELS / "draft") <= MAX_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "least"), [("eagle3", 3.5), ("block", 3.5), ("medusa", 1.9)])
def test_embedded_heads_are_found_and_draft_well(drafter: str, least: float) -> None:
    """Without --draft the demo's own head is meant; catches one trained for another target."""
    llm = LLM("demo", drafter=drafter)
    plain = LLM("demo", drafter="none")
    prompts = [one.prompt for one in islice(problems(2024, held_out=True), 3)]
    params = SamplingParams(max_tokens=60)
    answers = llm.generate(prompts, params)
    assert [answer.text for answer in answers] == [
        answer.text for answer in plain.generate(prompts, params)
    ]
    steps = sum(answer.stats.steps for answer in answers)
    emitted = sum(answer.stats.emitted for answer in answers)
    assert emitted / steps > least


def test_both_models_share_one_tokenizer_template_and_end() -> None:
    """Catches a half-finished update: a draft exported with another tokenizer or template than the
    target."""
    words, draft_words = (AutoTokenizer.from_pretrained(path) for path in demo_paths())
    assert words.get_vocab() == draft_words.get_vocab()
    assert words.chat_template == draft_words.chat_template
    turns = [{"role": "user", "content": "1+1?"}]
    text = words.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<s>Question: 1+1?\nAnswer:"
    assert words.chat_template.strip() == tokenizer.CHAT_TEMPLATE.strip()
    for path in demo_paths():
        settings = json.loads((path / "generation_config.json").read_text())
        assert settings["eos_token_id"] == corpus.EOS_ID


def test_accuracy_and_tau_are_about_what_the_card_says() -> None:
    """Catches weights and card that do not belong together; ten problems, so only gross errors."""
    report = json.loads((MODELS / "evaluation.json").read_text())
    words = AutoTokenizer.from_pretrained(demo_paths().target)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in demo_paths()
    )
    chosen = list(islice(problems(1000, held_out=True, weights={1: 1.0}), 10))
    answers = greedy_tokens(target, words, [problem.prompt for problem in chosen], 60)
    right = sum(is_correct(words.decode(a), p.answer) for a, p in zip(answers, chosen, strict=True))
    assert right / 10 >= report["accuracy_by_grade"]["1"] - 0.3
    sequences = [(words(p.prompt)["input_ids"], a) for a, p in zip(answers, chosen, strict=True)]
    assert (
        chain_tau(draft, sequences)["tau_k5"]
        >= 0.7 * report["draft_on_generated"]["grade1"]["tau_k5"]
    )
