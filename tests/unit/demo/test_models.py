"""The committed pair is the pair that was measured."""

import json
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.demo import corpus, demo_paths, tokenizer
from outrider.demo.evaluate import chain_tau, greedy_tokens
from outrider.demo.problems import is_correct, problems

MODELS = demo_paths().target.parent
MAX_BYTES = 35e6

_HAS_PAIR = (MODELS / "evaluation.json").exists()
pytestmark = pytest.mark.skipif(not _HAS_PAIR, reason="the pair is not in this checkout")


def test_folder_stays_small() -> None:
    assert sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file()) <= MAX_BYTES


def test_both_models_share_one_tokenizer_template_and_end() -> None:
    """Catches a half-finished update: a draft exported with another tokenizer or template than the target."""
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
    target, draft = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in demo_paths())
    chosen = list(islice(problems(1000, held_out=True, weights={1: 1.0}), 10))
    answers = greedy_tokens(target, words, [problem.prompt for problem in chosen], 60)
    right = sum(is_correct(words.decode(a), p.answer) for a, p in zip(answers, chosen, strict=True))
    assert right / 10 >= report["accuracy_by_grade"]["1"] - 0.3
    sequences = [(words(p.prompt)["input_ids"], a) for a, p in zip(answers, chosen, strict=True)]
    assert chain_tau(draft, sequences)["tau_k5"] >= 0.7 * report["draft_on_generated"]["grade1"]["tau_k5"]
