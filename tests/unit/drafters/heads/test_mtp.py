"""MTP heads at work: their drafts are those of the head applied to the whole text, whatever the layout, cache and runtime."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, modeling_layers
from transformers.generation import candidate_generator
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from outrider.build import Built, Options, build
from outrider.draft_length import FixedLength
from outrider.errors import CapabilityError
from outrider.models.heads.mtp_files import ships_mtp, weigh_mtp
from outrider.models.loading.load import load_config, load_module
from outrider.rows import Rows
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from tests.contract.multimodal_families import make_whole
from tests.contract.own_cache_families import FAMILIES as ON_THEIR_OWN
from tests.contract.own_cache_families import NATIVE
from tests.contract.test_multimodal import saved as saved_whole
from tests.helpers import make_row, run_to_end, tiny_llama, word_tokenizer
from tests.mtp_heads import SHIPPED, WEIGHTS, MtpReference, save_with_mtp
from tests.older_transformers import IS_OLDER, skip_older
from tests.unit.runtime.families import EXPERTS, FAMILIES, HALF_WINDOWED, SHORT_WINDOW, SIZES

VOCAB = SIZES["vocab_size"]
PROMPTS = ([5, 6, 7, 8, 9], [3, 4, 5, 3, 4, 5, 3], [11, 12])
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
STAND_INS = [("qwen2", "mimo"), ("qwen3", "qwen")]  # MiMo's code is its own; dense
ON_OUR_CACHE = [*STAND_INS, *((family, layout) for family, layout in SHIPPED.items() if family in FAMILIES)]
BESIDE_STATES = [(family, layout) for family, layout in SHIPPED.items() if family in NATIVE]
ON_THEIR_OWN_CACHE = [each for each in SHIPPED.items() if each not in (*ON_OUR_CACHE, *BESIDE_STATES)]  # an indexer picks keys
SEVERAL = [("glm4_moe", "deepseek", 3), ("qwen3_5_text", "qwen", 2), ("mimo_v2_flash", "megatron", 3), ("step3p7", "deepseek", 2)]
SEVERAL += [("deepseek_v32", "deepseek", 3), ("minimax_m3_vl_text", "megatron", 2)]
CHANGED: dict[str, dict[str, Any]] = {
    "inkling_text": {
        "mlp_layer_types": ["sparse", "dense"], "layer_types": ["hybrid", "hybrid_sliding"], "sliding_window_size": 8,
        "num_mtp_layers": 2, "mtp_local_layer_ids": [0, 1]},
    "mimo_v2_flash": {"mlp_layer_types": ["sparse", "dense"]},  # the head's layer is dense
    "mellum": {**HALF_WINDOWED, "num_mtp_layers": 1, "layer_types": ["full_attention", "sliding_attention"]},
}  # fmt: skip
OLDER = {  # with transformers 5.17
    "ernie4_5_moe": "its router begins as zeros, and which of equal experts it picks follows no rule",
}
STACKED = {"layers_block_type": ["mamba", "attention", "moe"]}  # the last two make a layer of the head


def random_model(family: str, seed: int) -> Any:
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    if family == "step3p7":
        return random_step(seed)
    own = {**(FAMILIES.get(family) or ON_THEIR_OWN.get(family) or {}), **CHANGED.get(family, {})}
    named = {**SIZES, **own, "eos_token_id": 0}
    if family == "nemotron_h":
        named = {**{key: value for key, value in named.items() if key != "num_hidden_layers"}, **STACKED}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **copy.deepcopy(named))
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


def random_step(seed: int, *, num_sliding_attention_heads: int = 2) -> Any:
    """Step 3.7 with the vision tower that all its checkpoints have. Its last layer is like the head's: windowed and dense."""
    kinds = ["full_attention", *["sliding_attention"] * 3]  # of the target's two layers and the head's two
    text = {key: value for key, value in SIZES.items() if key != "bos_token_id"}
    text |= {**EXPERTS, **SHORT_WINDOW, "n_routed_experts": 4, "share_expert_dim": 32, "pad_token_id": 0, "moe_layers_enum": "0"}
    text |= {"layer_types": kinds, "num_nextn_predict_layers": 2, "num_sliding_attention_heads": num_sliding_attention_heads}
    pictures = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model("step3p7", text_config=text, vision_config=pictures, image_token_id=90)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


def random_inkling(seed: int, *, has_norm: bool) -> Any:
    """Inkling with its senses, as it is published. `has_norm`: one stands behind each layer of its head. Windows are longer than
    texts: transformers 5.23 leaves them out of the head's masks."""
    text = {**CHANGED["inkling_text"], "chain_hidden_post_norm": has_norm, "sliding_window_size": 64, "unpadded_vocab_size": 90}
    whole = make_whole("inkling_mm_model", text_config=text)
    generator = torch.Generator().manual_seed(seed)
    for weight in whole.parameters():
        weight += 0.5 * weight.std() * torch.randn(weight.shape, generator=generator) if weight.numel() > 1 else 0
    return whole


def random_text(config: Any, seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval().requires_grad_(False)


def echoing_llama(seed: int, *, noise: float = 0.0) -> Any:
    """A target of one layer over embeddings of length 1, which a head with the same layer follows nearly always."""
    model = tiny_llama(VOCAB, sharpness=1.5, num_hidden_layers=1).requires_grad_(False)
    table = model.get_input_embeddings().weight
    table.copy_(table / table.pow(2).mean(-1, keepdim=True).sqrt())
    if seed and noise:
        generator = torch.Generator().manual_seed(seed)
        for weight in model.model.layers.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator) if weight.dim() > 1 else 0
    return model


class Ragged(FixedLength):
    """Another length for every row and step, 0 among them."""

    def choose(self, rows: Rows) -> list[int]:
        return [row.clamp_draft((len(row.tokens) + index) % (self.gamma + 1)) for index, row in enumerate(rows)]


def built(folder: Path, runtime: str = "eager", **options: Any) -> Built:
    return build(Options(target=str(folder), dtype="float32", threads=1, num_draft_tokens=3, runtime=runtime, **options))


def saved(folder: Path, make: Callable[[int], Any], layout: str, **options: Any) -> MtpReference:
    reference = save_with_mtp(folder, make, layout, **options)
    word_tokenizer(VOCAB).save_pretrained(folder)
    return reference


def watched(made: Built) -> list[tuple[list[int], list[int]]]:
    """(text, draft) of every chain that is proposed from now on."""
    seen: list[tuple[list[int], list[int]]] = []
    propose = made.decoder.drafter.propose

    def watching(rows: Rows, gamma: list[int]) -> Draft:
        draft = propose(rows, gamma)
        for row, tokens, length in zip(rows, *draft.lists[:2], strict=True):
            seen.append((list(row.tokens), tokens[:length]))
        return draft

    made.decoder.drafter.propose = watching  # type: ignore[method-assign]
    return seen


def write(made: Built, params: SamplingParams = PARAMS) -> list[Any]:
    """All prompts in one batch, which they join one by one."""
    for number, prompt in enumerate(PROMPTS):
        made.decoder.add(make_row(prompt, params, number=number, seed=number))
        made.decoder.step()
    return run_to_end(made.decoder)


def check(folder: Path, reference: MtpReference, runtime: str) -> None:
    """Every draft of a batch is the reference's; the texts are plain decoding's."""
    made = built(folder, runtime, drafter="mtp")
    seen = watched(made)
    rows = write(made)
    assert sum(len(draft) for _, draft in seen) > 60
    for text, draft in seen:
        assert not draft or draft == reference.draft(text, len(draft))[0], text
    assert [row.output for row in rows] == [row.output for row in write(built(folder, runtime, drafter="none"))]


@pytest.mark.parametrize(("family", "layout"), ON_OUR_CACHE)
def test_drafts_of_every_layout(tmp_path: Path, family: str, layout: str) -> None:
    """Catches norms mixed up, the projection's halves in the wrong order, a state before the norm where it is read behind it, a
    rejected draft that stays in the cache, a row fed another row's states. On the native runtime, where every pass is lowered."""
    if IS_OLDER and family in OLDER:
        pytest.skip(OLDER[family])
    check(tmp_path, saved(tmp_path, partial(random_model, family), layout), "native")
    assert ships_mtp(str(tmp_path))


def test_a_head_of_another_folder_says_how_far_it_knows(tmp_path: Path) -> None:
    """Catches drafts beyond the context of a head whose target can hold more; several layers drop what they put aside, too."""
    for layers in (1, 2):
        folder = tmp_path / str(layers)
        saved(folder, partial(random_model, "deepseek_v3"), "deepseek")
        save_with_mtp(folder / "head", partial(random_model, "deepseek_v3"), "deepseek", num_layers=layers, alone=True)
        config = json.loads((folder / "head" / "config.json").read_text())
        (folder / "head" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
        made = built(folder, "native", drafter="mtp", drafter_options={"head": str(folder / "head")})
        assert any("knows 16 positions" in note and "beyond 16 nothing is drafted" in note for note in made.notes)
        seen = watched(made)
        rows = write(made)
        assert all(len(text) + len(draft) <= 16 for text, draft in seen if draft)
        assert {len(text) for text, draft in seen if draft} >= {13, 14, 15}
        assert [row.output for row in rows] == [row.output for row in write(built(folder, "native", drafter="none"))]


@pytest.mark.parametrize(
    ("family", "layout", "runtime"),
    [*((*each, "native") for each in BESIDE_STATES), *((*each, "auto") for each in ON_THEIR_OWN_CACHE)],
)
def test_targets_with_states(tmp_path: Path, family: str, layout: str, runtime: str) -> None:
    """Beside a hybrid the head keeps keys and values of its own; else it runs on transformers' cache, too.

    Catches an indexer's keys of rejected drafts, and a row that goes back to another state than the target's last word.
    """
    check(tmp_path, saved(tmp_path, partial(random_model, family), layout), runtime)
    assert ships_mtp(str(tmp_path))
    with pytest.raises(CapabilityError, match=r"states cannot branch|needs transformers' own cache"):
        built(tmp_path, drafter="mtp", drafter_options={"tree": "2x2x1"})


@pytest.mark.parametrize(("family", "layout"), BESIDE_STATES)
def test_trees_beside_a_hybrid(tmp_path: Path, family: str, layout: str) -> None:
    """On the native runtime states branch: the texts are plain decoding's to the bit, with T = 1 as with T = 0."""
    if family == "nemotron_h" and IS_OLDER:
        pytest.skip(f"the head of {family} runs on transformers' own cache with transformers {transformers.__version__}")
    saved(tmp_path, partial(random_model, family), layout)
    made = built(tmp_path, "native", drafter="mtp", drafter_options={"tree": "2x2x1"})
    plain = built(tmp_path, "native", drafter="none")
    assert made.config()["exact"]
    assert made.draws_trees
    assert [row.output for row in write(made)] == [row.output for row in write(plain)]
    assert sum(row.stats.accepted for row in write(made, replace(PARAMS, temperature=1.0))) > 0


def test_a_head_on_transformers_cache_drafts_no_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's layers have full attention and keep no states; the head's is sparse, as MiniMax M3's heads are."""
    make, head = partial(random_model, "minimax_m3_vl_text"), {"head": str(tmp_path / "head")}
    save_with_mtp(tmp_path / "head", make, "megatron", alone=True)
    monkeypatch.setitem(CHANGED, "minimax_m3_vl_text", {"layer_types": ["full_attention"] * 2})
    saved(tmp_path, make, "megatron")
    with pytest.raises(CapabilityError, match="an MTP head on transformers' own cache drafts chains: leave tree=2x2x1 out"):
        built(tmp_path, drafter="mtp", drafter_options={**head, "tree": "2x2x1"})


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_row_on_transformers_cache_moves(tmp_path: Path, num_layers: int) -> None:
    """Catches a row that another decoder goes on with from the state of a draft."""
    reference = saved(tmp_path, partial(random_model, "minimax_m3_vl_text"), "megatron", num_layers=num_layers)
    made = built(tmp_path, drafter="mtp")
    seen, drafter = watched(made), made.decoder.drafter
    weighed = weigh_mtp(str(tmp_path), reference.target.config, torch.float32)
    assert drafter.lm.kv.bytes_per_token == weighed.kv_bytes_per_token  # type: ignore[attr-defined]
    for number, prompt in enumerate(PROMPTS):
        made.decoder.add(make_row(prompt, PARAMS, number=number))
    for _ in range(4):
        made.decoder.step()
        row, state = made.decoder.rows[-1], drafter.pack(len(PROMPTS) - 1)
        drafter.stop(len(PROMPTS) - 1)
        drafter.start(row)
        drafter.unpack(state)
    assert sum(len(draft) for _, draft in seen) > 20
    assert all(not draft or draft == reference.draft(text, len(draft))[0] for text, draft in seen)


def test_a_head_and_a_look_up_take_turns_beside_a_hybrid(tmp_path: Path) -> None:
    """`mode=best` drafts chains; the text is plain decoding's to the bit."""
    saved(tmp_path, partial(random_model, "qwen3_5_text"), "qwen")
    parts = {"parts": "mtp,ngram"}
    made = built(tmp_path, "native", drafter="composite", drafter_options={**parts, "mode": "best"})
    assert made.config()["exact"]
    assert not made.draws_trees
    asked = {part.name: 0 for part in made.decoder.drafter.parts}  # type: ignore[attr-defined]
    propose = made.decoder.drafter.propose

    def watching(rows: Rows, gamma: list[int]) -> Draft:
        draft = propose(rows, gamma)
        assert draft.parents is None
        for part in made.decoder.drafter.parts:  # type: ignore[attr-defined]
            asked[part.name] += sum(part.draft.lists[1])
        return draft

    made.decoder.drafter.propose = watching  # type: ignore[method-assign]
    assert [row.output for row in write(made)] == [row.output for row in write(built(tmp_path, "native", drafter="none"))]
    assert all(asked.values()), asked


def test_a_head_and_a_look_up_draft_one_tree_beside_a_hybrid(tmp_path: Path) -> None:
    """Parts merged into a tree branch the states at every kind of node; the text is plain decoding's to the bit."""
    saved(tmp_path, partial(random_model, "qwen3_5_text"), "qwen")
    made = built(tmp_path, "native", drafter="composite", drafter_options={"parts": "mtp,ngram"})
    assert made.draws_trees
    assert [row.output for row in write(made)] == [row.output for row in write(built(tmp_path, "native", drafter="none"))]


def test_a_checkpoint_that_takes_pictures(tmp_path: Path) -> None:
    """Qwen3.5's are published so: the text's sizes are a part of the config, its layers have other names than the head's."""
    saved_whole("qwen3_5", tmp_path / "model")
    text: Any = load_module(str(tmp_path / "model"), load_config(str(tmp_path / "model")), torch.float32, torch.device("cpu"))
    reference = save_with_mtp(
        tmp_path / "head", lambda seed: random_text(text.config, seed) if seed else text, "qwen", alone=True
    )  # fmt: skip
    head, whole = (load_file(tmp_path / name / WEIGHTS) for name in ("head", "model"))
    save_file({**whole, **head}, tmp_path / "model" / WEIGHTS, metadata={"format": "pt"})
    made = built(tmp_path / "model")
    assert made.options.drafter == "mtp"
    seen = watched(made)
    write(made)
    assert sum(len(draft) for _, draft in seen) > 60
    assert all(not draft or draft == reference.draft(tokens, len(draft))[0] for tokens, draft in seen)


@pytest.mark.parametrize(("family", "layout", "num_layers"), SEVERAL)
def test_several_layers_take_turns(tmp_path: Path, family: str, layout: str, num_layers: int) -> None:
    """Catches a layer at the wrong position, one not run before a commit, guesses kept in a deeper layer's cache."""
    reference = saved(tmp_path, partial(random_model, family), layout, num_layers=num_layers)
    check(tmp_path, reference, "auto")
    made = built(tmp_path, drafter="mtp")
    made.decoder.control = Ragged(num_layers)
    seen = watched(made)
    write(made)
    assert {len(draft) for _, draft in seen} == set(range(num_layers + 1))
    assert all(not draft or draft == reference.draft(text, len(draft))[0] for text, draft in seen)


OF_LATE = skip_older("`use_mtp` fails for layers of two kinds")
BY_TRANSFORMERS = [  # all families that `use_mtp` is for, but for stateful ones, which it refuses, and Inkling
    ("deepseek_v3", "deepseek", 1), ("glm4_moe", "deepseek", 1), ("glm4_moe", "deepseek", 2),
    *(pytest.param(*case, marks=OF_LATE) for case in (("mellum", "qwen", 1), ("step3p7", "deepseek", 2))),
]  # fmt: skip


@pytest.mark.skipif(not hasattr(candidate_generator, "MTPCandidateGenerator"), reason="transformers 5.23 has it")
@pytest.mark.parametrize(("family", "layout", "num_layers"), BY_TRANSFORMERS)
def test_drafts_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, layout: str, num_layers: int
) -> None:
    """Against `generate(use_mtp=True)`, which drafts one token with each layer, from the first pass behind the prompt on."""
    make = partial(random_step, num_sliding_attention_heads=4) if family == "step3p7" else partial(random_model, family)
    saved(tmp_path, make, layout, num_layers=num_layers)
    if family == "step3p7":  # it reads neither these names, nor output heads of a layer, nor its own number of heads
        tensors = load_file(tmp_path / WEIGHTS)
        own = {name.replace("transformer.shared", "shared"): part for name, part in tensors.items() if "d.output" not in name}
        save_file(own, tmp_path / WEIGHTS, metadata={"format": "pt"})
    model = (AutoModelForImageTextToText if family == "step3p7" else AutoModelForCausalLM).from_pretrained(tmp_path)
    model._keys_to_ignore_on_load_unexpected = [r"\blayers\.[23]\.", r"^mtp\."]  # by which it finds the head
    theirs: dict[tuple[int, ...], list[int]] = {}
    generator: Any = candidate_generator.MTPCandidateGenerator
    propose = generator.get_candidates

    def recording(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        found, logits = propose(self, input_ids, *args, **kwargs)
        theirs[tuple(input_ids[0].tolist())] = found[0, input_ids.shape[1] :].tolist()
        return found, logits

    monkeypatch.setattr(generator, "get_candidates", recording)
    prompt = torch.tensor([PROMPTS[1]])
    text = model.generate(prompt, max_new_tokens=14, do_sample=False, use_mtp=True, eos_token_id=None)[0].tolist()
    made = built(tmp_path, drafter="mtp")
    made.decoder.control = FixedLength(num_layers)
    seen = watched(made)
    made.decoder.add(make_row(PROMPTS[1], SamplingParams(max_tokens=14, ignore_eos=True)))
    assert run_to_end(made.decoder)[0].tokens == text
    whole = [(tuple(tokens), draft) for tokens, draft in seen if len(draft) == num_layers]
    compared = [(theirs[tokens], draft) for tokens, draft in whole if theirs.get(tokens)]
    assert len(compared) >= 5
    assert all(one == other for one, other in compared)


@skip_older("its own MTP layers fail without a cache")
@pytest.mark.parametrize("has_norm", [True, False])
def test_drafts_of_inkling_are_those_of_transformers(tmp_path: Path, has_norm: bool) -> None:
    """Against its layers in one pass over every text.

    In half of the cases no norm stands between the layers, nor before the output head."""
    saved(tmp_path, partial(random_inkling, has_norm=has_norm), "inkling", num_layers=2)
    if not has_norm:
        tensors = load_file(tmp_path / WEIGHTS)
        del tensors["model.mtp.chain_norm.weight"]
        save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    layers = modeling_layers.MtpModel.from_pretrained(model).eval()

    @torch.inference_mode()
    def expected(text: list[int], count: int) -> list[int]:
        states = model(input_ids=torch.tensor([text[:-1]]), output_hidden_states=True, use_cache=False).hidden_states[-1]
        found, _, _ = layers(
            input_ids=torch.tensor([text[1:]]), last_hidden_states=states, attention_mask=None,
            position_ids=torch.arange(1, len(text))[None], mtp_cache=None,
        )  # fmt: skip
        return found[0, :count].tolist()

    made = built(tmp_path)
    assert made.options.drafter == "mtp"
    seen = watched(made)
    rows = write(made)
    assert sum(len(draft) for _, draft in seen) > 40
    assert all(draft == expected(text, len(draft)) for text, draft in seen if draft)
    assert [row.output for row in rows] == [row.output for row in write(built(tmp_path, drafter="none"))]


@pytest.mark.parametrize("runtime", ["eager", "native"])
def test_a_good_head_is_followed(tmp_path: Path, runtime: str) -> None:
    """Catches a head that is fed one token too late: most drafts are kept, and some are rejected at every depth."""
    reference = saved(tmp_path, partial(echoing_llama, noise=0.05), "qwen", echoes=True)
    check(tmp_path, reference, runtime)
    stats = [row.stats for row in write(built(tmp_path, runtime))]  # auto
    accepted, tested = sum(one.accepted for one in stats), sum(one.tested for one in stats)
    assert 0.5 * tested < accepted < tested
