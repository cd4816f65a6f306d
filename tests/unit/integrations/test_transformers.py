"""The `custom_generate` bridge: tokens of transformers' own loop, modules left alone, refusals by
name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    MaxTimeCriteria,
    MinPLogitsWarper,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from outrider.errors import CapabilityError, ConfigError, OutriderError, RequestError
from outrider.integrations import transformers as bridge
from outrider.integrations.transformers import Speculative, speculative
from tests.heads import HEADS
from tests.helpers import EOS, disturbed, save_checkpoint, tiny_llama, word_tokenizer

V = 24
PROMPT = [3, 4, 5, 6, 3, 4, 5]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_llama(V, seed=3, sharpness=2.0)


@pytest.fixture(scope="module")
def draft(target: LlamaForCausalLM) -> LlamaForCausalLM:
    return disturbed(target, 0.3)


@pytest.fixture(scope="module")
def loop() -> Speculative:
    """One n-gram loop for the module: its probes run once."""
    return speculative(num_draft_tokens=3)


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def without_end(**options: Any) -> dict[str, Any]:
    """Options of a call that only its length ends."""
    return {"eos_token_id": None, "pad_token_id": EOS, **options}


@pytest.mark.parametrize("kind", ["ngram", "module", "folder", "none", "itself"])
def test_greedy_equals_transformers(
    kind: str, target: LlamaForCausalLM, draft: LlamaForCausalLM, tmp_path: Path
) -> None:
    """A draft that leaks into the text, or a cache that drifts from the tokens."""
    options: dict[str, Any] = {
        "ngram": {},
        "module": {"draft": draft},
        "folder": {"draft": str(tmp_path)},
        "none": {"drafter": "none"},
        "itself": {"draft": target},
    }[kind]
    if kind == "folder":
        save_checkpoint(tmp_path, draft, None)
    mine = speculative(num_draft_tokens=4, **options)
    for prompt in (PROMPT, [7]):
        call = without_end(inputs=ids(prompt), max_new_tokens=24, do_sample=False)
        assert torch.equal(target.generate(**call, custom_generate=mine), target.generate(**call))
    assert mine.stats is not None
    assert mine.stats.emitted == 24
    assert (mine.stats.accepted > 0) == (kind != "none")


@pytest.mark.parametrize("verifier", ["block", "token", "gumbel"])
def test_every_verifier(verifier: str, target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    """A verifier named but not used would show up as an unknown name accepted."""
    call = without_end(inputs=ids(PROMPT), max_new_tokens=12)
    mine = target.generate(**call, custom_generate=speculative(draft=draft, verifier=verifier))
    assert torch.equal(mine, target.generate(**call))


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_left_padded_batch_equals_single_rows(
    penalty: float, target: LlamaForCausalLM, loop: Speculative
) -> None:
    """Padding that is attended to, counted as a position, or punished by the repetition penalty."""
    rows = [[5, 6, 7], PROMPT, [9]]
    width = max(map(len, rows))
    padded = ids(*([EOS] * (width - len(row)) + row for row in rows))
    mask = ids(*([0] * (width - len(row)) + [1] * len(row) for row in rows))
    options = without_end(max_new_tokens=10, repetition_penalty=penalty)
    batch = target.generate(padded, attention_mask=mask, custom_generate=loop, **options)
    assert torch.equal(batch[:, :width], padded)
    for row, out in zip(rows, batch, strict=True):
        alone = target.generate(ids(row), custom_generate=loop, **options)[0, len(row) :]
        assert out[width:].tolist() == alone.tolist()
        assert alone.tolist() == target.generate(ids(row), **options)[0, len(row) :].tolist()


def test_end_tokens_stop_rows_and_pad_the_rest(target: LlamaForCausalLM, loop: Speculative) -> None:
    """Text after the end token, a wrong fill value, or a width other than the longest row's."""
    prompts = ids([1, 2, 3], [8, 9, 10], [4, 4, 4])
    free = target.generate(prompts, **without_end(max_new_tokens=16))
    ends = [int(free[0, 3 + 4]), int(free[1, 3 + 7])]
    call = {"inputs": prompts, "max_new_tokens": 16, "eos_token_id": ends, "pad_token_id": 23}
    plain = target.generate(**call)
    assert torch.equal(target.generate(**call, custom_generate=loop), plain)
    assert (plain == 23).any()
    del call["pad_token_id"]
    assert torch.equal(target.generate(**call, custom_generate=loop), target.generate(**call))


@pytest.mark.slow
def test_sampling_follows_torch_seed(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    """A hidden source of randomness, rows that share one, or a greedy call that uses up torch's."""
    mine = speculative(draft=draft)
    call = without_end(
        inputs=ids(PROMPT), max_new_tokens=20, do_sample=True, temperature=1.5, top_k=0
    )

    def run(seed: int, **more: Any) -> Tensor:
        torch.manual_seed(seed)
        return target.generate(**call, **more, custom_generate=mine)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    three = run(1, num_return_sequences=3)
    assert three.shape[0] == 3
    assert torch.equal(three[:1], run(1))
    assert len({tuple(row) for row in three.tolist()}) == 3
    state = torch.get_rng_state()
    target.generate(ids(PROMPT), max_new_tokens=2, custom_generate=mine)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 0},
        {"temperature": 1.3, "top_k": 4},
        {"top_k": 0, "top_p": 0.6},
        {"top_k": 0, "min_p": 0.2},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.4},
    ],
)
def test_sampling_options_reach_the_distribution(
    options: dict[str, Any], target: LlamaForCausalLM, loop: Speculative
) -> None:
    """A sampling option dropped on the way: first tokens counted against transformers' own
    processors."""
    num = 200
    prompt = ids(PROMPT)
    call = without_end(inputs=prompt, max_new_tokens=1, do_sample=True, **options)
    torch.manual_seed(0)
    drawn = target.generate(**call, num_return_sequences=num, custom_generate=loop)[:, -1]
    plain = target.generate(**call, return_dict_in_generate=True, output_scores=True)
    probs = torch.softmax(plain.scores[0][0], dim=-1)
    counts = torch.bincount(drawn, minlength=V)
    assert not counts[probs == 0].any()
    spread = (num * probs * (1 - probs)).sqrt()
    # 24 tokens: false alarm below 2e-5
    assert ((counts - num * probs).abs() <= 5 * spread + 1).all()


def test_custom_processors_that_have_an_equal(target: LlamaForCausalLM, loop: Speculative) -> None:
    """A custom warper that is accepted but not applied: top-k 1 leaves one choice."""
    call = without_end(inputs=ids(PROMPT), max_new_tokens=8, do_sample=True, top_k=0)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(1.4), TopKLogitsWarper(1)])
    greedy = target.generate(ids(PROMPT), **without_end(max_new_tokens=8))
    assert torch.equal(
        target.generate(**call, logits_processor=warpers, custom_generate=loop), greedy
    )


def test_streamer_gets_prompt_tokens_and_end(target: LlamaForCausalLM, loop: Speculative) -> None:
    """transformers drops the streamer of a callable: without the bridge's care it would wait for
    ever."""
    call = without_end(inputs=ids(PROMPT), max_new_tokens=9)
    mine = Recorder()
    plain = Recorder()
    target.generate(**call, streamer=mine, custom_generate=loop)
    target.generate(**call, streamer=plain)
    assert mine.puts == plain.puts
    assert mine.ended == 1


def test_text_iterator_streamer_ends(target: LlamaForCausalLM, loop: Speculative) -> None:
    """The usual way to stream: generate in a thread, iterate here."""
    tokenizer = word_tokenizer(V)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    call = without_end(inputs=ids(PROMPT), max_new_tokens=9)
    thread = Thread(
        target=target.generate, kwargs={**call, "streamer": streamer, "custom_generate": loop}
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    expected = target.generate(**call)[0, len(PROMPT) :]
    assert text.split() == tokenizer.decode(expected).split()


def test_output_object(target: LlamaForCausalLM, loop: Speculative) -> None:
    """`return_dict_in_generate` ignored."""
    call = without_end(inputs=ids(PROMPT), max_new_tokens=5)
    out = target.generate(**call, return_dict_in_generate=True, custom_generate=loop)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert torch.equal(out.sequences, target.generate(**call))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("fails", [False, True])
def test_modules_are_left_as_they_were(
    implementation: str, fails: bool, target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our attention left behind, packed or moved weights, frozen parameters, another mode."""
    model = copy.deepcopy(target)
    small = disturbed(target, 0.1)
    for module in (model, small):
        module.set_attn_implementation(implementation)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    kinds = [type(part) for part in model.modules()]
    with torch.no_grad():
        logits = model(ids(PROMPT)).logits
    if fails:
        monkeypatch.setattr("outrider.decode.Decoder.step", _fail)
        with pytest.raises(RuntimeError, match="halfway"):
            model.generate(ids(PROMPT), max_new_tokens=4, custom_generate=speculative(draft=small))
    else:
        model.generate(ids(PROMPT), max_new_tokens=4, custom_generate=speculative(draft=small))
    assert model.config._attn_implementation == implementation
    assert small.config._attn_implementation == implementation
    assert [type(part) for part in model.modules()] == kinds
    assert all(weight.requires_grad for weight in model.parameters())
    assert not model.training
    after = model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    again = model(ids(PROMPT)).logits
    assert torch.equal(again, logits)
    again.sum().backward()


def _fail(*_: object) -> None:
    raise RuntimeError("halfway")


def test_a_refused_model_is_restored(loop: Speculative) -> None:
    """A probe that fails after it switched the attention."""
    broken = tiny_llama(V)
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    with pytest.raises(OutriderError, match="NaN"):
        broken.generate(ids(PROMPT), max_new_tokens=4, custom_generate=loop)
    assert broken.config._attn_implementation == "sdpa"


def test_probes_run_once_and_again_after_a_change(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes on every call (slow), or stale ones after the model changed its dtype."""
    calls: list[str] = []
    original = bridge.build_lm
    monkeypatch.setattr(bridge, "build_lm", lambda *args: calls.append("") or original(*args))
    model = copy.deepcopy(target)
    mine = speculative()
    for _ in range(3):
        model.generate(ids(PROMPT), max_new_tokens=3, custom_generate=mine)
    assert len(calls) == 1
    model.double()
    call = without_end(inputs=ids(PROMPT), max_new_tokens=8)
    assert torch.equal(model.generate(**call, custom_generate=mine), model.generate(**call))
    assert len(calls) == 2


def test_a_model_of_another_family(loop: Speculative) -> None:
    """Something Llama-only in the bridge."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=V, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.4
    )
    model = GPT2LMHeadModel(config).eval()
    call = without_end(inputs=ids(PROMPT), max_new_tokens=10)
    assert torch.equal(model.generate(**call, custom_generate=loop), model.generate(**call))


class Never(StoppingCriteria):
    """A criterion of one's own."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("num_beams=2", {"num_beams": 2}),
    ("no_repeat_ngram_size=2", {"no_repeat_ngram_size": 2}),
    ("typical_p=0.5", {"typical_p": 0.5, "do_sample": True}),
    ("epsilon_cutoff", {"epsilon_cutoff": 0.1, "do_sample": True}),
    ("min_new_tokens=2", {"min_new_tokens": 2, "eos_token_id": 2}),
    ("bad_words_ids", {"bad_words_ids": [[3]]}),
    ("suppress_tokens", {"suppress_tokens": [3]}),
    ("sequence_bias", {"sequence_bias": [[[3], 1.0]]}),
    ("guidance_scale=1.5", {"guidance_scale": 1.5}),
    ("remove_invalid_values=True", {"remove_invalid_values": True}),
    ("max_time=5.0", {"max_time": 5.0}),
    ("use_cache=False", {"use_cache": False}),
    ("cache_implementation='static'", {"cache_implementation": "static"}),
    ("prompt_lookup_num_tokens=3", {"prompt_lookup_num_tokens": 3}),
    ("output_attentions=True", {"output_attentions": True, "return_dict_in_generate": True}),
    ("output_hidden_states=True", {"output_hidden_states": True, "return_dict_in_generate": True}),
    ("output_scores=True", {"output_scores": True, "return_dict_in_generate": True}),
    ("output_logits=True", {"output_logits": True, "return_dict_in_generate": True}),
    ("PrefixConstrainedLogitsProcessor", {"prefix_allowed_tokens_fn": lambda batch, text: [3]}),
    ("MaxTimeCriteria", {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(9.0)])}),
    ("Never", {"stopping_criteria": StoppingCriteriaList([Never()])}),
    (
        "TopKLogitsWarper after MinPLogitsWarper",
        {"logits_processor": LogitsProcessorList([MinPLogitsWarper(0.1), TopKLogitsWarper(3)])},
    ),
    (
        "TopKLogitsWarper with filter_value",
        {"logits_processor": LogitsProcessorList([TopKLogitsWarper(3, filter_value=-5.0)])},
    ),
    ("synced_gpus", {"synced_gpus": True}),
    ("past_key_values", {"past_key_values": DynamicCache()}),
    ("position_ids", {"position_ids": torch.arange(7)[None] + 3}),
    ("logits_to_keep", {"logits_to_keep": 3}),
    ("a row may grow to 3007 tokens", {"max_new_tokens": 3000}),
    ("padding_side", {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0]])}),
    ("padding_side", {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]])}),
]


@pytest.mark.parametrize(("named", "options"), REFUSED, ids=[named for named, _ in REFUSED])
def test_refused_by_name(
    named: str, options: dict[str, Any], target: LlamaForCausalLM, loop: Speculative
) -> None:
    """Something accepted and ignored."""
    call = without_end(inputs=ids(PROMPT), max_new_tokens=4)
    with pytest.raises(CapabilityError) as refusal:
        target.generate(**{**call, **options}, custom_generate=loop)
    assert named in str(refusal.value)
    assert target.config._attn_implementation == "sdpa"


def test_a_companion_is_not_looked_for() -> None:
    """The target has no name here."""
    with pytest.raises(ConfigError, match=r"draft=.auto. looks for .* name the draft"):
        speculative(draft="auto")


def test_assistant_model_is_refused(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    """transformers drops it before a callable is called."""
    with pytest.raises(CapabilityError, match="assistant_model"):
        target.generate(
            ids(PROMPT), max_new_tokens=4, assistant_model=draft, custom_generate=speculative()
        )


def test_inputs_embeds_are_refused(target: LlamaForCausalLM, loop: Speculative) -> None:
    """Embeddings have no token ids to draft from."""
    embeds = target.get_input_embeddings()(ids(PROMPT))
    with pytest.raises(OutriderError, match="inputs_embeds"):
        target.generate(inputs_embeds=embeds, max_new_tokens=4, custom_generate=loop)


def test_streaming_a_batch_is_refused(target: LlamaForCausalLM, loop: Speculative) -> None:
    """Rows run ahead of one another, a streamer wants them in step."""
    with pytest.raises(CapabilityError, match="streamer"):
        target.generate(
            ids(PROMPT, PROMPT), max_new_tokens=4, streamer=Recorder(), custom_generate=loop
        )


def test_empty_rows_and_foreign_tokens_are_refused(
    target: LlamaForCausalLM, loop: Speculative
) -> None:
    """Errors from deep inside the model instead of a sentence."""
    with pytest.raises(RequestError, match="empty"):
        target.generate(
            ids(PROMPT, PROMPT),
            attention_mask=ids([1] * 7, [0] * 7),
            max_new_tokens=4,
            custom_generate=loop,
        )
    with pytest.raises(RequestError, match="token 99"):
        target.generate(ids([1, 99]), max_new_tokens=4, custom_generate=loop)


def test_training_mode_is_refused(target: LlamaForCausalLM, loop: Speculative) -> None:
    """Dropout would make every pass another model."""
    with pytest.raises(CapabilityError, match=r"training mode.*\.eval"):
        copy.deepcopy(target).train().generate(ids(PROMPT), max_new_tokens=4, custom_generate=loop)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"drafter": "ngramm"}, "ngramm"),
        ({"verifier": "blok"}, "blok"),
        ({"num_draft_tokens": 0}, "num_draft_tokens"),
        ({"drafter": "draft-model"}, "needs draft="),
        ({"drafter": "ngram", "draft": "somewhere"}, "uses no draft model"),
    ],
)
def test_wrong_options_speak_before_the_call(options: dict[str, Any], named: str) -> None:
    """A misspelt name that only shows up inside generate."""
    with pytest.raises(ConfigError, match=named):
        speculative(**options)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "block"])
def test_a_trained_head_as_the_draft(target: LlamaForCausalLM, tmp_path: Path, kind: str) -> None:
    """Its folder says who drafts; as a draft model it is refused with the words that use it."""
    HEADS[kind](target, tmp_path / kind)
    loop = speculative(draft=tmp_path / kind)
    plain = target.generate(ids(PROMPT), max_new_tokens=20, do_sample=False)
    assert target.generate(
        ids(PROMPT), max_new_tokens=20, do_sample=False, custom_generate=loop
    ).equal(plain)
    assert loop.stats is not None
    assert loop.stats.drafted > 0
    with pytest.raises(ConfigError, match=f"is a trained head, not a draft model: .*{kind}"):
        speculative(draft=tmp_path / kind, drafter="draft-model")
