"""Kind draft-model: where it starts, what it learns, and that others load what is saved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.build import Options
from outrider.errors import CapabilityError, CheckpointError, ConfigError
from outrider.lab.progress import Progress
from outrider.llm import LLM
from outrider.models.loading import load
from outrider.models.source import resolve
from outrider.sampling.params import SamplingParams
from outrider.train.config import TrainConfig
from outrider.train.draft_model import DraftModelRecipe, DraftModelTraining
from outrider.train.masked import check_masks, free_token, with_masks
from outrider.train.material import TrainingData
from outrider.train.measure import MeasurePlan
from outrider.train.new_model import chosen_layers, scratch_model, thinned_model
from outrider.train.responses import ResponsePlan
from outrider.train.run import TrainSpec, run_training
from tests.gguf_files import VOCABULARY_SIZE, Kind, rounded, write_model
from tests.helpers import byte_tokenizer, disturbed, save_checkpoint, tiny_llama, word_tokenizer
from tests.unit.train.material import save_responses, spec_for, texts

CONFIG = TrainConfig(epochs=1, batch_size=4, lr=1e-3, held_out=0.2)


def test_chosen_layers() -> None:
    """A number is spread evenly with both ends; a list is a list, also of one."""
    assert chosen_layers("3", 9, "x") == [0, 4, 8]
    assert chosen_layers("1", 9, "x") == [0]
    assert chosen_layers("9", 9, "x") == list(range(9))
    assert chosen_layers("0,2,7", 9, "x") == [0, 2, 7]
    for text in ("0", "10", "2,1", "1,9", "a", "1,1"):
        with pytest.raises(ConfigError, match="init_layers"):
            chosen_layers(text, 9, "x")


def test_all_layers_are_the_target() -> None:
    """Every weight where it belongs: thinned by nothing, the model is the target."""
    target = tiny_llama(257, num_hidden_layers=3)
    copy = thinned_model(target, "3", "x")
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(copy(tokens).logits, target(tokens).logits)


def test_thinned_layers_keep_their_weights_and_order() -> None:
    """Layers 0 and 2 become 0 and 1; what the config lists for each layer follows."""
    target = tiny_llama(257, num_hidden_layers=3)
    copy = thinned_model(target, "0,2", "x")
    assert copy.config.num_hidden_layers == 2
    assert torch.equal(
        copy.model.layers[1].mlp.up_proj.weight, target.model.layers[2].mlp.up_proj.weight
    )


def test_layers_that_keep_their_weights_in_blocks_are_copied_as_plain_ones(tmp_path: Path) -> None:
    """From a GGUF file: what is copied is what the file's blocks stand for, the output layer and
    embeddings included."""
    target = tiny_llama(
        VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        tie_word_embeddings=False,
    )
    file = str(write_model(tmp_path / "target.gguf", target, "llama", kind=Kind.Q8_0))
    module = load.load_module(
        resolve(str(file)), load.load_config(resolve(str(file))), torch.float32, torch.device("cpu")
    )
    copy = thinned_model(module, "0,2", "x")
    for layer, original in ((0, 0), (1, 2)):
        own = copy.model.layers[layer].mlp.down_proj.weight
        theirs = target.model.layers[original].mlp.down_proj.weight
        assert torch.equal(own, rounded(theirs.detach(), Kind.Q8_0))
    for own, theirs in (
        (copy.lm_head, target.lm_head),
        (copy.model.embed_tokens, target.model.embed_tokens),
    ):
        assert torch.equal(own.weight, rounded(theirs.weight.detach(), Kind.Q8_0))
    whole = thinned_model(module, "3", "x")
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            whole(tokens).logits, module(tokens).logits, atol=2e-4, rtol=1e-3
        )


def test_scratch_sizes() -> None:
    """Sizes are as given, the rest by the target; the error names what does not fit."""
    target = tiny_llama(257)
    model = scratch_model(target, {"hidden_size": 48, "num_layers": 3, "num_heads": 6}, "x")
    assert (
        model.config.hidden_size,
        model.config.num_hidden_layers,
        model.config.num_attention_heads,
    ) == (48, 3, 6)
    assert scratch_model(target, {}, "x").config.num_hidden_layers == 1
    with pytest.raises(ConfigError, match="even multiple of num_heads"):
        scratch_model(target, {"hidden_size": 50, "num_heads": 4}, "x")


@pytest.mark.parametrize("loss", ["kl", "reverse_kl", "jsd", "tv", "ce", "nla", "lk_hybrid"])
def test_every_loss_brings_the_draft_nearer(tmp_path: Path, loss: str) -> None:
    """A loss that is minimised elsewhere would not raise the expected tau of a draft that begins
    near the target."""
    recipe, batch = _recipe_and_batch(DraftModelTraining(loss=loss))
    optimizer = torch.optim.AdamW(recipe.module.parameters(), lr=2e-3)
    first = recipe.loss(batch).parts["acceptance"]
    for _ in range(8):
        optimizer.zero_grad()
        recipe.loss(batch).loss.backward()
        optimizer.step()
    assert recipe.loss(batch).parts["acceptance"] > first + 0.05


def _recipe_and_batch(settings: DraftModelTraining) -> tuple[DraftModelRecipe, Any]:
    from outrider.train.features import FeatureSource
    from outrider.train.texts import collate

    target = tiny_llama(257, sharpness=2.0)
    batch = FeatureSource(target, ()).features(collate(texts(), range(6), torch.device("cpu")))
    return DraftModelRecipe(
        disturbed(target, 0.5), settings, byte_tokenizer(), torch.float32, None
    ), batch


def test_a_perfect_draft_has_the_whole_tau() -> None:
    """Expected tau of the target as its own draft: depth + 1, whatever the loss."""
    target = tiny_llama(257)
    recipe, batch = _recipe_and_batch(DraftModelTraining(depth=4))
    recipe.module.load_state_dict(
        {name: value.float() for name, value in target.state_dict().items()}
    )
    recipe.module.lm_head.weight.data.mul_(2.0)  # the target's sharpness
    report = recipe.loss(batch)
    assert report.survival == pytest.approx([1.0] * 4, abs=1e-4)
    assert float(report.loss.detach()) == pytest.approx(0.0, abs=1e-4)


@pytest.mark.slow
def test_saved_drafts_load_everywhere(tmp_path: Path) -> None:
    """`--draft`, and transformers' assisted generation with the same greedy text; saving does not
    round the training."""
    spec = spec_for(tmp_path, kind="draft-model", settings={"init_layers": "2"}, config=CONFIG)
    target_folder = spec.options.target
    (tmp_path / "target" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    run_training(spec)
    folder = spec.out / "drafter"
    assert (folder / "chat_template.jinja").exists()
    prompt = [10, 11, 12, 13]
    plain = LLM(target_folder, drafter="none").generate(prompt, SamplingParams(max_tokens=12))[0]
    llm = LLM(target_folder, drafter="draft-model", draft=folder)
    assert llm.generate(prompt, SamplingParams(max_tokens=12))[0].token_ids == plain.token_ids
    target, draft = (AutoModelForCausalLM.from_pretrained(path) for path in (target_folder, folder))
    AutoTokenizer.from_pretrained(folder)
    assisted = target.generate(
        torch.tensor([prompt]), assistant_model=draft, do_sample=False, max_new_tokens=12
    )
    assert assisted[0, len(prompt) :].tolist()[: len(plain.token_ids)] == plain.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, False])
def test_bfloat16_targets_do_not_round_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    """The saved draft has the target's dtype, also where that dtype is slow here and another one
    was loaded.

    Saving it on the way must not change the run."""
    monkeypatch.setattr(load, "has_fast_bf16", lambda: fast)
    save_checkpoint(
        tmp_path / "target", tiny_llama(257, num_hidden_layers=3).bfloat16(), byte_tokenizer()
    )
    save_responses(tmp_path / "responses.jsonl", texts())
    spec = spec_for(
        tmp_path,
        kind="draft-model",
        settings={"init_layers": "2"},
        config=replace(CONFIG, epochs=3, lr=1e-5),
    )
    result = run_training(spec)
    assert result is not None
    # steps far below bfloat16's resolution add up
    assert result.curve[1].loss != result.curve[0].loss
    assert (
        load_file(spec.out / "drafter" / "model.safetensors")["model.norm.weight"].dtype
        == torch.bfloat16
    )


def test_bad_starts(tmp_path: Path) -> None:
    """Another tokenizer, sizes of a model that is given, what does not exist."""
    spec = spec_for(tmp_path, kind="draft-model", config=CONFIG)
    foreign = save_checkpoint(tmp_path / "foreign", tiny_llama(50), word_tokenizer(50))
    same = save_checkpoint(tmp_path / "same", tiny_llama(257), byte_tokenizer())
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"init": foreign}, CapabilityError, "another tokenizer"),
        ({"init": same, "settings": {"init_layers": "2"}}, ConfigError, "leave init_layers out"),
        ({"settings": {"init_layers": "2", "num_layers": "2"}}, ConfigError, "not both"),
        ({"settings": {"los": "kl"}}, ConfigError, "Did you mean 'loss'"),
        ({"settings": {"loss": "lk"}}, ConfigError, "unknown loss 'lk'"),
        ({"kind": "draft-modle"}, ConfigError, "Did you mean 'draft-model'"),
    ]
    for number, (changes, error, message) in enumerate(cases):
        with pytest.raises(error, match=message):
            run_training(replace(spec, out=tmp_path / f"bad{number}", **changes))


@pytest.mark.slow
def test_from_traffic_refreshes(tmp_path: Path) -> None:
    """The target answers requests of an OpenAI log again, and training continues from the given
    draft."""
    spec = spec_for(tmp_path, kind="draft-model", settings={"init_layers": "2"}, config=CONFIG)
    run_training(spec)
    log = tmp_path / "log.jsonl"
    log.write_text(
        "".join(
            f'{{"request": {{"prompt": "please {n}"}}, "response": {{"choices": [{{"text": "yes {n}"}}]}}}}\n'
            for n in range(4)
        )
    )
    for recorded in (False, True):
        fresh: TrainSpec = replace(
            spec,
            out=tmp_path / f"fresh{recorded}",
            settings={},
            init=spec.out / "drafter",
            responses=ResponsePlan(max_tokens=6),
            material=TrainingData(traffic=str(log), recorded_answers=recorded),
            measure=MeasurePlan(prompts=1, max_tokens=4),
            options=Options(spec.options.target, drafter="ngram"),
        )
        result = run_training(fresh, Progress())
        assert result is not None
        assert result.num_train == 3
        assert {one.label for one in result.measured} == {"before", "after"}
        assert (fresh.out / "responses.jsonl").exists() is not recorded


def test_masks_learn_what_they_would_read_at_work() -> None:
    """An anchor's masks compute what they do after the text up to it, whatever other anchors there
    are."""
    module = tiny_llama(257)
    tokens = torch.randint(5, 250, (2, 9))
    starts = torch.tensor([[6, 2], [0, 5]])
    masked = with_masks(tokens, starts, torch.ones(2, 2, 4, dtype=torch.bool), 3)
    with torch.no_grad():
        logits = masked.logits(module)
        torch.testing.assert_close(logits[:, :9], module(tokens).logits)
        guesses = logits[:, 9:].view(2, 2, 3, -1)
        for row, line in enumerate(starts.tolist()):
            for anchor, start in enumerate(line):
                alone = torch.cat([tokens[row, : start + 1], torch.tensor([3, 3, 3])])
                expected = module(alone[None]).logits[0, -3:]
                torch.testing.assert_close(guesses[row, anchor], expected)


def test_a_free_token_is_unnamed_or_rare() -> None:
    """The first id without a name; where all have one, the last of the rarest."""
    tokenizer = word_tokenizer(20)
    counts = torch.ones(24, dtype=torch.int64)
    counts[[4, 11]] = 0
    assert free_token(tokenizer, counts, 24) == 20
    assert free_token(tokenizer, counts, 20) == 11


def test_masks_that_share_a_pass_must_not_meet() -> None:
    """A model that does not do as the mask of a pass says, as where a state is carried."""
    module = tiny_llama(257)
    check_masks(module, 3, "x")
    forward = module.forward
    module.forward = lambda attention_mask=None, **inputs: forward(**inputs)  # type: ignore[method-assign]
    with pytest.raises(CapabilityError, match="leave parallel out"):
        check_masks(module, 3, "x")


@pytest.mark.slow
def test_parallel_drafts_learn_and_load(tmp_path: Path) -> None:
    """Its config names the mask token, with which it drafts; going on keeps it. The text is plain
    decoding's."""
    settings = {"init_layers": "2", "parallel": "4"}
    config = replace(CONFIG, epochs=4, lr=5e-3)
    spec = spec_for(tmp_path, kind="draft-model", settings=settings, config=config)
    result = run_training(spec)
    assert result is not None
    assert result.curve[-1].tau > result.curve[0].tau
    folder = spec.out / "drafter"
    token = json.loads((folder / "config.json").read_text())["pard_token"]
    prompt = [10, 11, 12, 13]
    plain = LLM(spec.options.target, drafter="none").generate(prompt, SamplingParams(max_tokens=12))
    llm = LLM(spec.options.target, drafter="draft-model", draft=folder)
    assert any(f"mask token {token}" in note for note in llm.notes)
    assert llm.generate(prompt, SamplingParams(max_tokens=12))[0].token_ids == plain[0].token_ids
    more = replace(spec, out=tmp_path / "more", init=folder, settings={"parallel": "6"})
    run_training(more)
    assert json.loads((more.out / "drafter" / "config.json").read_text())["pard_token"] == token


@pytest.mark.parametrize("token", [True, 257, -1, "x"])
def test_a_mask_token_outside_the_vocabulary(token: Any, tmp_path: Path) -> None:
    """One line that says which ids there are, before anything is decoded; where nobody drafts with
    it, nothing."""
    target = save_checkpoint(tmp_path / "target", tiny_llama(257), byte_tokenizer())
    draft = tiny_llama(257)
    draft.config.pard_token = token
    folder = save_checkpoint(tmp_path / "draft", draft, byte_tokenizer())
    with pytest.raises(CheckpointError, match=r"\(pard_token\).*ids 0 to 256") as caught:
        LLM(target, draft=folder)
    assert len(str(caught.value).splitlines()) == 1
    LLM(folder, drafter="none")
