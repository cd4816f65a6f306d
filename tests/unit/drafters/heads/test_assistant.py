"""Gemma 4's assistants: their drafts are those of transformers' code on the target's keys and
values."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.generation import candidate_generator

from outrider.build import Built, Options, build
from outrider.errors import CapabilityError, CheckpointError
from outrider.models.heads.assistant import Assistant, every_layer_shares, read_layers
from outrider.models.heads.kinds import head_kind
from outrider.models.loading.load import build_lm
from outrider.models.source import resolve
from outrider.sampling.params import SamplingParams
from tests.gguf_files import Kind
from tests.gguf_heads import round_matrices, write_assistant
from tests.helpers import make_row, run_to_end, tiny_llama, word_tokenizer
from tests.mtp_heads import WEIGHTS
from tests.older_transformers import skip_older
from tests.unit.drafters.heads.test_mtp import PARAMS, watched, write
from tests.unit.runtime.families import FAMILIES, SIZES
from tests.unit.runtime.test_windows import filled, whole

WINDOW = 8  # shorter than the texts
TARGET: dict[str, Any] = {
    **SIZES,
    **FAMILIES["gemma4_text"],
    "sliding_window": WINDOW,
    "eos_token_id": 0,
}
TEXT: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": SIZES["vocab_size"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
    "sliding_window": WINDOW, "max_position_embeddings": 2048, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "initializer_range": 0.2, "eos_token_id": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "all tokens": {}, "clusters": {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3},
}  # fmt: skip


def saved(
    folder: Path, kind: str = "all tokens", target: dict[str, Any] | None = None, **text: Any
) -> tuple[Any, Any]:
    """A random target in `folder`, its assistant in `folder/assistant`; both as transformers runs
    them."""
    vocab = 96 if kind == "clusters" else SIZES["vocab_size"]  # clusters are of one size
    own = {**TARGET, "vocab_size": vocab, "vocab_size_per_layer_input": vocab, **(target or {})}
    with torch.random.fork_rng(), every_layer_shares():
        torch.manual_seed(0)
        config = AutoConfig.for_model("gemma4_text", **copy.deepcopy(own))
        model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        own = {**TEXT, "vocab_size": vocab, **text}
        options = {**KINDS[kind], "text_config": own, "backbone_hidden_size": SIZES["hidden_size"]}
        config = AutoConfig.for_model("gemma4_assistant", **copy.deepcopy(options))
        assistant = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        if assistant.masked_embedding is not None:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(vocab))
    model.save_pretrained(folder)
    word_tokenizer(vocab).save_pretrained(folder)
    assistant.save_pretrained(folder / "assistant")
    return model, assistant


def built(folder: Path, runtime: str = "eager", head: Path | None = None, **options: Any) -> Built:
    head = head or folder / "assistant"
    return build(
        Options(
            target=str(folder),
            draft=str(head),
            dtype="float32",
            threads=1,
            num_draft_tokens=3,
            runtime=runtime,
            **options,
        )
    )


@torch.no_grad()
def reference(model: Any, assistant: Any, text: list[int], count: int) -> list[int]:
    """What transformers' assistant drafts behind a text, from one pass of the target over it."""
    read = model(
        torch.tensor([text[:-1]]),
        output_hidden_states=True,
        return_shared_kv_states=True,
        past_key_values=DynamicCache(config=model.config),
    )
    states = read.hidden_states[-1][:, -1:]
    token = torch.tensor([text[-1:]])
    drafted = list[int]()
    for _ in range(count):
        inputs = torch.cat([model.get_input_embeddings()(token), states], dim=-1)
        made = assistant(
            inputs_embeds=inputs,
            position_ids=torch.tensor([[len(text) - 1]]),
            shared_kv_states=read.shared_kv_states,
        )
        token = made.logits.argmax(-1)
        states = made.last_hidden_state
        drafted.append(int(token))
    return drafted


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "runtime"), [("all tokens", "eager"), ("clusters", "native")])
def test_drafts_are_those_of_transformers(tmp_path: Path, kind: str, runtime: str) -> None:
    """Catches another layer's keys, a window that is off by one, a position that moves, a rejected
    token's keys that are still seen, a row that sees its neighbour's."""
    model, assistant = saved(tmp_path, kind)
    made = built(tmp_path, runtime)
    assert made.options.drafter == "mtp"
    seen = watched(made)
    rows = write(made)
    assert sum(len(draft) for _, draft in seen) > 60
    assert max(len(text) for text, draft in seen if draft) > 2 * WINDOW
    assert all(draft == reference(model, assistant, text, len(draft)) for text, draft in seen)
    plain = build(
        Options(target=str(tmp_path), dtype="float32", threads=1, runtime=runtime, drafter="none")
    )
    assert [row.output for row in rows] == [row.output for row in write(plain)]


@pytest.mark.slow
@skip_older("`generate` drafts with an assistant in another way")
def test_the_first_draft_is_that_of_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against `generate(assistant_model=...)`: behind the prompt, where its keys are exactly those
    of the text."""
    model, assistant = saved(tmp_path)
    assistant.generation_config.num_assistant_tokens = 3
    theirs: list[list[int]] = []
    generator: Any = candidate_generator.SinglePositionMultiTokenCandidateGenerator
    propose = generator.get_candidates

    def recording(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        found, logits = propose(self, input_ids, *args, **kwargs)
        theirs.append(found[0, input_ids.shape[1] :].tolist())
        return found, logits

    monkeypatch.setattr(generator, "get_candidates", recording)
    prompt = [5, 6, 7, 8, 9, 3, 4, 5, 3, 4, 5, 3]
    text = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=8,
        do_sample=False,
        assistant_model=assistant,
        eos_token_id=None,
    )
    made = built(tmp_path)
    seen = watched(made)
    made.decoder.add(make_row(prompt, SamplingParams(max_tokens=8, ignore_eos=True)))
    assert run_to_end(made.decoder)[0].tokens == text[0].tolist()
    drafts = {len(tokens): draft for tokens, draft in seen}
    assert drafts[len(prompt) + 1] == next(draft for draft in theirs if draft)


def test_it_finds_what_windows_have_not_passed(tmp_path: Path) -> None:
    """Rows of a target with windows begin at positions of their own; it sees the keys that it sees
    in whole rows."""
    model, module = saved(tmp_path)
    lm = build_lm(model, "target", torch.float32, torch.device("cpu"))
    layers = read_layers(model.config)
    sights = []
    for one in (lm, whole(lm)):
        filled(one, lengths := (1500, 700, 1300))
        seen = Assistant(module, one, layers, model.get_input_embeddings()).look(lengths)
        assert seen.positions.flatten().tolist() == list(lengths)
        masked = {kind: [mask[row, 0, 0] for row in range(3)] for kind, mask in seen.masks.items()}
        sights.append(
            [
                store[row][:, masked[kind][row]]
                for kind, stores in seen.shared.items()
                for store in stores
                for row in range(3)
            ]
        )
    assert len(set(lm.kv.bases)) > 1
    assert all(map(torch.equal, *sights))
    assert {sight.shape[1] for sight in sights[0]} == {WINDOW + 1, 1500, 700, 1300}


@pytest.mark.slow
def test_trees_and_sampling(tmp_path: Path) -> None:
    """Greedy text with trees is plain decoding's; seeded text at T = 1 with the invariant verifier,
    too."""
    saved(tmp_path)
    plain = build(
        Options(target=str(tmp_path), dtype="float32", threads=1, drafter="none", verifier="gumbel")
    )
    tree = built(tmp_path, drafter_options={"tree": "best-first"}, verifier="traversal")
    assert [row.output for row in write(tree)] == [row.output for row in write(plain)]
    hot = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0)
    chain = built(tmp_path, verifier="gumbel")
    assert [row.output for row in write(chain, hot)] == [row.output for row in write(plain, hot)]


@pytest.mark.slow
def test_an_assistant_that_knows_shorter_texts_says_so(tmp_path: Path) -> None:
    saved(tmp_path, max_position_embeddings=14)
    made = built(tmp_path)
    assert any(
        "knows 14 positions" in note and "beyond 14 nothing is drafted" in note
        for note in made.notes
    )
    seen = watched(made)
    write(made)
    assert {len(text) + len(draft) for text, draft in seen if draft} <= set(range(15))


def edited(folder: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], Any]) -> None:
    there = folder / "assistant"
    tensors = load_file(there / WEIGHTS)
    config = json.loads((there / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, there / WEIGHTS, metadata={"format": "pt"})
    (there / "config.json").write_text(json.dumps(config))


WRONG: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Any]], Any], str]] = {
    "width": (lambda t, c: c.update(backbone_hidden_size=48), "backbone_hidden_size is 48, expected 64"),
    "heads": (lambda t, c: c["text_config"].update(num_key_value_heads=1), "read 1 key heads of size 16, the target has 2 of 16"),
    "lacks": (lambda t, c: t.pop("post_projection.weight"), "it lacks 'post_projection.weight'"),
    "NaN": (lambda t, c: t["pre_projection.weight"].fill_(float("nan")), "has NaN or infinite values"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, wrong: str) -> None:
    change, expected = WRONG[wrong]
    saved(tmp_path)
    edited(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        built(tmp_path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_target_of_another_family_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    other = tiny_llama(SIZES["vocab_size"])
    other.save_pretrained(tmp_path / "llama")
    word_tokenizer(SIZES["vocab_size"]).save_pretrained(tmp_path / "llama")
    with pytest.raises(
        CheckpointError, match="it reads the keys of layers with full_attention, and llama has none"
    ):
        built(tmp_path / "llama", head=tmp_path / "assistant")


@pytest.mark.slow
def test_it_is_found_by_its_config(tmp_path: Path) -> None:
    saved(tmp_path)
    assert head_kind(resolve(str(tmp_path / "assistant"))) == "mtp"
    assert head_kind(resolve(str(tmp_path))) is None
    with pytest.raises(CapabilityError, match="an assistant takes entropy and product"):
        built(tmp_path, drafter_options={"stop": "acceptance", "acceptance_head": str(tmp_path)})
    with pytest.raises(CapabilityError, match="takes no window: it reads the target's keys"):
        built(tmp_path, drafter_options={"window": "auto"})
    assert write(built(tmp_path, drafter_options={"stop": "product"}), PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_an_assistant_in_a_gguf_file(tmp_path: Path, kind: Kind) -> None:
    """Catches norms and scales mixed up, another rotation of full attention, and tables that are
    not the file's."""
    model, assistant = saved(tmp_path)
    if kind is not Kind.F32:
        round_matrices(assistant, kind)
    path = write_assistant(tmp_path / "assistant.gguf", assistant, kind=kind)
    assert head_kind(resolve(str(path))) == "mtp"
    made = built(tmp_path, head=path)
    assert made.options.drafter == "mtp"
    seen = watched(made)
    write(made)
    assert sum(len(draft) for _, draft in seen) > 60
    assert all(draft == reference(model, assistant, text, len(draft)) for text, draft in seen)
    with pytest.raises(
        CheckpointError, match=r"made for another target: backbone_hidden_size is 96, expected 64"
    ):
        built(tmp_path, head=write_assistant(path, assistant, changes={"embedding_length_out": 96}))
    with pytest.raises(CheckpointError, match="holds a draft head and no model"):
        build(Options(target=str(path)))
