from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Trouble(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TROUBLE_NONE: _ClassVar[Trouble]
    TROUBLE_UNKNOWN_ROW: _ClassVar[Trouble]
    TROUBLE_MISSING_TOKENS: _ClassVar[Trouble]
    TROUBLE_REFUSED: _ClassVar[Trouble]
    TROUBLE_BUSY: _ClassVar[Trouble]
TROUBLE_NONE: Trouble
TROUBLE_UNKNOWN_ROW: Trouble
TROUBLE_MISSING_TOKENS: Trouble
TROUBLE_REFUSED: Trouble
TROUBLE_BUSY: Trouble

class Hello(_message.Message):
    __slots__ = ("protocol", "release", "instance", "model")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    release: str
    instance: str
    model: ModelIdentity
    def __init__(self, protocol: _Optional[int] = ..., release: _Optional[str] = ..., instance: _Optional[str] = ..., model: _Optional[_Union[ModelIdentity, _Mapping]] = ...) -> None: ...

class ModelIdentity(_message.Message):
    __slots__ = ("name", "vocab_size", "vocabulary_sha256", "tokenizer_sha256", "model_sha256", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SHA256_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    MODEL_SHA256_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    vocab_size: int
    vocabulary_sha256: str
    tokenizer_sha256: str
    model_sha256: str
    facts: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., vocabulary_sha256: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., model_sha256: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "release", "instance", "model", "notes", "draft", "target")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    release: str
    instance: str
    model: ModelIdentity
    notes: _containers.RepeatedScalarFieldContainer[str]
    draft: DraftTerms
    target: TargetTerms
    def __init__(self, protocol: _Optional[int] = ..., release: _Optional[str] = ..., instance: _Optional[str] = ..., model: _Optional[_Union[ModelIdentity, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ..., draft: _Optional[_Union[DraftTerms, _Mapping]] = ..., target: _Optional[_Union[TargetTerms, _Mapping]] = ...) -> None: ...

class DraftTerms(_message.Message):
    __slots__ = ("drafter", "max_draft_tokens", "max_rows", "max_context", "has_distributions")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    HAS_DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    max_draft_tokens: int
    max_rows: int
    max_context: int
    has_distributions: bool
    def __init__(self, drafter: _Optional[str] = ..., max_draft_tokens: _Optional[int] = ..., max_rows: _Optional[int] = ..., max_context: _Optional[int] = ..., has_distributions: bool = ...) -> None: ...

class TargetTerms(_message.Message):
    __slots__ = ("max_context", "max_running", "max_waiting", "drafters", "lossless", "eos_token_ids", "config_json", "sampling_defaults_json", "lossy_verifiers")
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    LOSSLESS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_JSON_FIELD_NUMBER: _ClassVar[int]
    LOSSY_VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    max_context: int
    max_running: int
    max_waiting: int
    drafters: _containers.RepeatedScalarFieldContainer[str]
    lossless: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    config_json: str
    sampling_defaults_json: str
    lossy_verifiers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, max_context: _Optional[int] = ..., max_running: _Optional[int] = ..., max_waiting: _Optional[int] = ..., drafters: _Optional[_Iterable[str]] = ..., lossless: bool = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., config_json: _Optional[str] = ..., sampling_defaults_json: _Optional[str] = ..., lossy_verifiers: _Optional[_Iterable[str]] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[RowRequest]
    def __init__(self, rows: _Optional[_Iterable[_Union[RowRequest, _Mapping]]] = ...) -> None: ...

class RowRequest(_message.Message):
    __slots__ = ("row", "base_length", "tokens", "sampling", "num_draft_tokens", "end")
    ROW_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    row: int
    base_length: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    num_draft_tokens: int
    end: bool
    def __init__(self, row: _Optional[int] = ..., base_length: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., num_draft_tokens: _Optional[int] = ..., end: bool = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "num_prompt", "seed", "coupled", "deterministic")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    COUPLED_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt: int
    seed: int
    coupled: bool
    deterministic: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., num_prompt: _Optional[int] = ..., seed: _Optional[int] = ..., coupled: bool = ..., deterministic: bool = ...) -> None: ...

class DraftReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[RowReply]
    def __init__(self, rows: _Optional[_Iterable[_Union[RowReply, _Mapping]]] = ...) -> None: ...

class RowReply(_message.Message):
    __slots__ = ("row", "base_length", "nodes", "have_length", "trouble", "reason")
    ROW_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    HAVE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    row: int
    base_length: int
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    have_length: int
    trouble: Trouble
    reason: str
    def __init__(self, row: _Optional[int] = ..., base_length: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., have_length: _Optional[int] = ..., trouble: _Optional[_Union[Trouble, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("parent", "token", "drawn", "distribution")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DRAWN_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    parent: int
    token: int
    drawn: bool
    distribution: Distribution
    def __init__(self, parent: _Optional[int] = ..., token: _Optional[int] = ..., drawn: bool = ..., distribution: _Optional[_Union[Distribution, _Mapping]] = ...) -> None: ...

class Distribution(_message.Message):
    __slots__ = ("tokens", "probs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., probs: _Optional[_Iterable[float]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("id", "prompt", "committed", "sampling_json", "seed", "speculation", "grammar", "prediction", "priority", "timeout_s", "prompt_logprobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_JSON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    id: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    committed: _containers.RepeatedScalarFieldContainer[int]
    sampling_json: str
    seed: int
    speculation: Speculation
    grammar: Grammar
    prediction: _containers.RepeatedScalarFieldContainer[int]
    priority: int
    timeout_s: float
    prompt_logprobs: int
    def __init__(self, id: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., committed: _Optional[_Iterable[int]] = ..., sampling_json: _Optional[str] = ..., seed: _Optional[int] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., prediction: _Optional[_Iterable[int]] = ..., priority: _Optional[int] = ..., timeout_s: _Optional[float] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("mode", "drafter", "max_draft_tokens", "invariant", "lossy")
    MODE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INVARIANT_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    mode: str
    drafter: str
    max_draft_tokens: int
    invariant: bool
    lossy: str
    def __init__(self, mode: _Optional[str] = ..., drafter: _Optional[str] = ..., max_draft_tokens: _Optional[int] = ..., invariant: bool = ..., lossy: _Optional[str] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("base_length", "token_ids", "text", "origins", "pieces", "logprobs", "prompt_logprobs", "finish", "drafted")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    origins: _containers.RepeatedScalarFieldContainer[str]
    pieces: _containers.RepeatedScalarFieldContainer[str]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish: Finish
    drafted: int
    def __init__(self, base_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., origins: _Optional[_Iterable[str]] = ..., pieces: _Optional[_Iterable[str]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., drafted: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("none", "tokens", "values")
    NONE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    none: bool
    tokens: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, none: bool = ..., tokens: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "stats_json", "seed", "lossless", "drafter", "stop_text", "stop_token", "reproducible", "queued_s", "prefill_s", "prompt_tokens", "cached_tokens", "preemptions", "error", "error_kind")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STATS_JSON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOSSLESS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REPRODUCIBLE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_KIND_FIELD_NUMBER: _ClassVar[int]
    reason: str
    stats_json: str
    seed: int
    lossless: bool
    drafter: str
    stop_text: str
    stop_token: int
    reproducible: bool
    queued_s: float
    prefill_s: float
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    error: str
    error_kind: str
    def __init__(self, reason: _Optional[str] = ..., stats_json: _Optional[str] = ..., seed: _Optional[int] = ..., lossless: bool = ..., drafter: _Optional[str] = ..., stop_text: _Optional[str] = ..., stop_token: _Optional[int] = ..., reproducible: bool = ..., queued_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., error: _Optional[str] = ..., error_kind: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("interval_s",)
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    def __init__(self, interval_s: _Optional[float] = ...) -> None: ...

class TargetState(_message.Message):
    __slots__ = ("running", "waiting", "prefilling", "kv_tokens", "kv_capacity", "draining", "failed", "turn_age_s")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PREFILLING_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    TURN_AGE_S_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    prefilling: int
    kv_tokens: int
    kv_capacity: int
    draining: bool
    failed: str
    turn_age_s: float
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., prefilling: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., kv_capacity: _Optional[int] = ..., draining: bool = ..., failed: _Optional[str] = ..., turn_age_s: _Optional[float] = ...) -> None: ...
