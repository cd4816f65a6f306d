"""Checkpoints with Python code of their own: the option that runs it is named where it is needed,
and nothing runs without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import CheckpointError
from outrider.llm import LLM
from outrider.sampling.params import SamplingParams
from tests.helpers import save_checkpoint, tiny_llama, word_tokenizer

pytestmark = pytest.mark.slow

QUIET: dict[str, Any] = {"drafter": "none", "runtime": "eager", "dtype": "float32"}
CONFIG = "from transformers import LlamaConfig\nclass MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
MODEL = "from transformers import LlamaForCausalLM\nclass MineForCausalLM(LlamaForCausalLM):\n    pass\n"
TOKENIZER = "from transformers import PreTrainedTokenizerFast\nclass MineTokenizer(PreTrainedTokenizerFast):\n    pass\n"


@pytest.fixture(autouse=True)
def code_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies the code that it runs to a folder of the user's."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )


def checkpoint(folder: Path, file: str, code: dict[str, str], **changes: Any) -> Path:
    save_checkpoint(folder, tiny_llama(96), word_tokenizer(96))
    settings = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**settings, **changes}))
    for name, text in code.items():
        (folder / name).write_text(text)
    return folder


def runs(folder: Path, **options: Any) -> LLM:
    llm = LLM(folder, **QUIET, **options)
    assert llm.generate([[3, 4]], SamplingParams(max_tokens=2))[0].stats.steps
    return llm


def test_a_model_that_only_its_own_code_knows(tmp_path: Path) -> None:
    """The library's sentence did not say what to do."""
    names = {
        "AutoConfig": "configuration_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    }
    own = "from .configuration_mine import MineConfig\n" + MODEL.replace(
        "pass", "config_class = MineConfig"
    )
    code = {"configuration_mine.py": CONFIG, "modeling_mine.py": own}
    folder = checkpoint(tmp_path / "own", "config.json", code, model_type="mine", auto_map=names)
    with pytest.raises(CheckpointError) as refused:
        LLM(folder, **QUIET)
    assert str(refused.value) == (
        f"the model of '{folder}' needs Python code of the checkpoint's own (configuration_mine.py, modeling_mine.py): "
        "read it, then pass --trust-remote-code (trust_remote_code=True in Python)."
    )
    runs(folder, trust_remote_code=True)


def test_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    """It was set to put files there that are there."""
    names = {"AutoTokenizer": [None, "tokenization_mine.MineTokenizer"]}
    folder = checkpoint(
        tmp_path / "tokenizer",
        "tokenizer_config.json",
        {"tokenization_mine.py": TOKENIZER},
        tokenizer_class="MineTokenizer",
        auto_map=names,
    )
    with pytest.raises(
        CheckpointError,
        match=r"the tokenizer of '.*' needs Python code of .* own \(tokenization_mine\.py\)",
    ):
        LLM(folder, **QUIET)
    runs(folder, trust_remote_code=True)


def test_code_that_is_not_needed_is_left_out_and_that_is_reported(tmp_path: Path) -> None:
    names = {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    folder = checkpoint(
        tmp_path / "both", "config.json", {"modeling_mine.py": MODEL}, auto_map=names
    )
    note = (
        f"'{folder}' brings code of its own (modeling_mine.MineForCausalLM), transformers' LlamaForCausalLM runs instead; "
        "trust_remote_code=true runs its own"
    )
    assert note in runs(folder).notes
    assert note not in runs(folder, trust_remote_code=True).notes
