"""GGUF files through the same doors as any checkpoint: the command line, `LLM`, drafters, and a
real published model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from outrider import LLM, SamplingParams
from outrider.cli.app import run
from outrider.models.loading.load import load_config, load_module, load_tokenizer
from outrider.models.source import resolve
from outrider.runtime import library
from tests.gguf_files import Kind, write_model
from tests.unit.models.gguf.test_loading import DELTA_NET, DELTA_NET_KEYS, made

PROMPTS = ["the 1 cat", "x = [1, 2,"]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
QUIET = ("--runtime", "eager", "--threads", "1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers in Q4_0, its embeddings in Q8_0."""
    kind = lambda name: Kind.Q8_0 if name.startswith(("token_embd", "output")) else Kind.Q4_0  # noqa: E731
    return write_model(
        tmp_path_factory.mktemp("gguf") / "tiny-Q4_0.gguf", made(), "llama", kind=kind
    )


@pytest.fixture(scope="module")
def plain(tiny: Path) -> list[list[int]]:
    return [
        list(done.token_ids)
        for done in LLM(str(tiny), drafter="none", runtime="eager").generate(PROMPTS, GREEDY)
    ]


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("ngram", {}),
        ("quantised", {"bits": 8}),
        ("quantised", {"bits": 4}),
        ("early-exit", {"exit_layer": 1}),
        ("draft-model", {}),
    ],
)
def test_greedy_text_with_speculation_is_greedy_text(
    tiny: Path, plain: list[list[int]], drafter: str, options: dict[str, Any]
) -> None:
    """Also for drafts derived from blocks, and with a GGUF file as the draft."""
    draft = str(tiny) if drafter == "draft-model" else None
    llm = LLM(str(tiny), draft=draft, drafter=drafter, drafter_options=options, runtime="eager")
    done = llm.generate(PROMPTS, GREEDY)
    assert [list(one.token_ids) for one in done] == plain
    if library.why_missing() is None:
        assert llm.config["exact"]
    if drafter != "ngram":
        assert sum(one.stats.accepted for one in done) > 0


@pytest.mark.parametrize(("kind", "bits"), [(Qwen3_5TextConfig, 8), (Qwen3_5MoeTextConfig, 4)])
def test_a_hybrid_runs_on_the_native_runtime(kind: type, bits: int, tmp_path: Path) -> None:
    """Qwen3.5: states, value heads in the file's order, trees."""
    if library.why_missing() is not None:
        pytest.skip(library.why_missing())
    sizes = DELTA_NET | {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    sizes |= {"shared_expert_intermediate_size": 64, "intermediate_size": 64}
    architecture = "qwen35moe" if kind is Qwen3_5MoeTextConfig else "qwen35"
    changes = {
        key.replace("qwen35.", f"{architecture}."): value for key, value in DELTA_NET_KEYS.items()
    }
    changes[f"{architecture}.expert_shared_feed_forward_length"] = (
        64 if architecture == "qwen35moe" else None
    )
    model = made(kind, **sizes)
    stored = Kind.Q8_0 if bits == 8 else Kind.Q4_0
    path = write_model(tmp_path / "m.gguf", model, architecture, changes=changes, kind=stored)
    plain = LLM(str(path), drafter="none").generate(PROMPTS, GREEDY)
    llm = LLM(str(path), drafter="ngram", drafter_options={"tree": 8})
    assert llm.config["runtime"].startswith("native"), llm.config
    done = llm.generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert llm.config["exact"]


@pytest.mark.slow
def test_the_command_line_takes_a_file(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["generate", str(tiny), "the 1 cat", "--max-tokens", "4", *QUIET])
    errors = capsys.readouterr().err
    assert code == 0, errors
    assert "keeps its weights in their blocks (Q4_0, Q8_0)" in errors


def test_a_damaged_file_is_one_line(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny.read_bytes()[:-1000])
    assert run(["generate", str(broken), "x", *QUIET]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert "is damaged" in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.slow
def test_a_published_model_is_what_transformers_makes_of_it(smollm: Path) -> None:
    """SmolLM2: weights to the bit as transformers widens them; text is split as by its own
    tokenizer.json (digits one by one)."""
    from transformers import AutoModelForCausalLM

    config = load_config(resolve(str(smollm)))
    tokenizer = load_tokenizer(resolve(str(smollm)))
    assert (config.max_position_embeddings, config.eos_token_id, config.vocab_size) == (
        8192,
        [0, 2],
        49152,
    )
    assert tokenizer("In 2024, x1").tokens() == ["In", "Ġ", "2", "0", "2", "4", ",", "Ġx", "1"]
    for text in (
        "naïve 日本語 🎉 e\u0301\u200d",
        "def f(x):\n\treturn x**2  # ok\r\n",
        "<|im_start|>user\nhi<|im_end|>",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )["input_ids"]
    assert tokenizer.decode(chat).endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ours = load_module(resolve(str(smollm)), config, torch.float32, torch.device("cpu"))
    file = next(smollm.glob("*.gguf"))
    theirs = AutoModelForCausalLM.from_pretrained(
        str(smollm), gguf_file=file.name, dtype=torch.float32
    )
    tokens = tokenizer("The lighthouse", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        assert torch.equal(ours(input_ids=tokens).logits, theirs(input_ids=tokens).logits)
