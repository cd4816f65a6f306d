"""Fields of other servers that would change the answer, and that this server cannot honour: refused
by name.

Names are those of OpenAI's, vLLM's, SGLang's, TGI's, llama.cpp's, Ollama's, OpenRouter's and
text-generation-webui's schemas. `NEUTRAL` has the values with which such a field asks for nothing;
clients that fill in every field send them.
"""

from __future__ import annotations

from typing import Any

SAMPLERS = "this server samples by temperature, top_k, top_p, min_p and the penalties"
NO_ADAPTERS = "a model answers with its own weights; name another one in 'model'"
THINKING = (
    "use 'thinking', or 'chat_template_kwargs' with the name that the model's chat template knows"
)
WITH_FORM = "use 'structured_outputs'"

REFUSED: dict[str, str] = {
    # beams, and other ways to choose
    "use_beam_search": "answers are sampled or greedy",
    "num_beams": "answers are sampled or greedy",
    "length_penalty": "it belongs to beam search",
    "early_stopping": "it belongs to beam search",
    "do_sample": "temperature 0 is greedy, any other samples",
    "mirostat": SAMPLERS, "mirostat_mode": SAMPLERS, "typical_p": SAMPLERS, "tfs": SAMPLERS, "tfs_z": SAMPLERS, "top_a": SAMPLERS,
    "top_n_sigma": SAMPLERS, "dynatemp_range": SAMPLERS, "dynamic_temperature": SAMPLERS, "smoothing_factor": SAMPLERS,
    "temperature_last": SAMPLERS, "xtc_probability": SAMPLERS, "dry_multiplier": SAMPLERS, "epsilon_cutoff": SAMPLERS,
    "eta_cutoff": SAMPLERS, "penalty_alpha": SAMPLERS, "no_repeat_ngram_size": SAMPLERS, "encoder_repetition_penalty": SAMPLERS,
    "guidance_scale": SAMPLERS, "cfg_scale": SAMPLERS, "samplers": SAMPLERS, "sampler_order": SAMPLERS,
    "sampler_priority": SAMPLERS,
    "watermark": "texts are not watermarked",
    "repetition_detection": "use 'repetition_penalty' or 'max_tokens'",
    # other names
    "repeat_penalty": "use 'repetition_penalty'",
    "random_seed": "use 'seed'",
    "stop_sequences": "use 'stop'", "stop_sequence": "use 'stop'", "stop_regex": "use 'stop', which takes texts",
    "max_new_tokens": "use 'max_tokens'", "max_output_tokens": "use 'max_tokens'", "max_length": "use 'max_tokens'",
    "n_predict": "use 'max_tokens'", "num_predict": "use 'max_tokens'",
    "t_max_predict_ms": "use 'max_tokens'; the server's own time limit holds for all requests",
    "min_new_tokens": "use 'min_tokens'", "min_length": "use 'min_tokens'",
    "num_return_sequences": "use 'n'", "n_cmpl": "use 'n'",
    "no_stop_trim": "use 'include_stop_str_in_output'",
    "n_probs": "use 'logprobs'", "top_n_tokens": "use 'logprobs'", "logprob_token_ids": "use 'logprobs'",
    "ban_eos_token": "use 'ignore_eos'",
    "options": "give its fields in the body itself",
    "extra_body": "give its fields in the body itself: it is an argument of the openai package, which does that",
    # the form of the answer
    "format": WITH_FORM, "grammar": WITH_FORM, "json_schema": WITH_FORM, "regex": WITH_FORM, "ebnf": WITH_FORM,
    "structural_tag": WITH_FORM, "guided_whitespace_pattern": "use 'structured_outputs', with 'whitespace_pattern'",
    # the prompt
    "truncate_prompt_tokens": "shorten the prompt before sending it",
    "truncate": "shorten the prompt before sending it",
    "transforms": "shorten the prompt before sending it",
    "input": "it belongs to /v1/responses",
    "negative_prompt": SAMPLERS,
    # thinking
    "think": THINKING, "enable_thinking": THINKING,
    "thinking_budget": "use 'thinking_token_budget', in a chat",
    "reasoning_format": "use 'separate_reasoning', in a chat",
    # parts of other servers
    "logits_processors": "use logit_bias, allowed_token_ids or a response format",
    "logits_processors_args": "use logit_bias, allowed_token_ids or a response format",
    "custom_logit_processor": "use logit_bias, allowed_token_ids or a response format",
    "lora": NO_ADAPTERS, "lora_path": NO_ADAPTERS, "lora_request": NO_ADAPTERS, "adapter_id": NO_ADAPTERS,
    "plugins": "this server has no plugins", "enable_search": "this server has no web search",
    "return_hidden_states": "answers are texts, token ids and log-probabilities",
    "cache_salt": "the prefix cache is shared by all requests",
    "kv_transfer_params": "keys and values stay in this process",
    "vllm_xargs": "use the field 'speculation' for what is particular to this server",
}  # fmt: skip

OFF = (False,)
ZERO = (0,)
ONE = (1,)
EMPTY: tuple[Any, ...] = ([], {}, "")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_beam_search": OFF, "num_beams": ONE, "length_penalty": ONE, "early_stopping": OFF, "do_sample": (True,),
    "mirostat": ZERO, "mirostat_mode": ZERO, "typical_p": ONE, "tfs": ONE, "tfs_z": ONE, "top_a": ZERO, "top_n_sigma": (0, -1),
    "dynatemp_range": ZERO, "dynamic_temperature": OFF, "smoothing_factor": ZERO, "temperature_last": OFF,
    "xtc_probability": ZERO, "dry_multiplier": ZERO, "epsilon_cutoff": ZERO, "eta_cutoff": ZERO, "penalty_alpha": ZERO,
    "no_repeat_ngram_size": ZERO,
    "encoder_repetition_penalty": ONE, "guidance_scale": ONE, "cfg_scale": ONE, "watermark": OFF, "repeat_penalty": ONE,
    "stop_sequences": EMPTY, "min_new_tokens": ZERO, "min_length": ZERO, "num_return_sequences": ONE, "n_probs": ZERO,
    "t_max_predict_ms": (0, -1), "n_cmpl": ONE, "no_stop_trim": OFF, "reasoning_format": ("auto", "deepseek"), "lora": ([],),
    "top_n_tokens": ZERO, "ban_eos_token": OFF, "options": EMPTY, "extra_body": EMPTY, "format": EMPTY, "grammar": EMPTY,
    "transforms": EMPTY, "negative_prompt": EMPTY, "logits_processors": EMPTY,
    "logits_processors_args": EMPTY, "plugins": EMPTY, "enable_search": OFF, "return_hidden_states": OFF, "vllm_xargs": EMPTY,
    "store": OFF, "service_tier": ("auto", "default"), "verbosity": ("medium",),
    "prompt_cache_retention": ("in_memory", "in-memory"),
}  # fmt: skip

WITHOUT_EFFECT: dict[str, str] = {
    "store": "this server stores no answers",
    "service_tier": "all requests have the same service; see 'priority'",
    "prompt_cache_retention": "prefixes are kept as long as there is room",
    "verbosity": "models here have no such setting; ask for it in the prompt",
}
