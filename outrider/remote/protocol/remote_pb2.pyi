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
    __slots__ = ("protocol", "release", "model")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    release: str
    model: ModelIdentity
    def __init__(self, protocol: _Optional[int] = ..., release: _Optional[str] = ..., model: _Optional[_Union[ModelIdentity, _Mapping]] = ...) -> None: ...

class ModelIdentity(_message.Message):
    __slots__ = ("name", "vocab_size", "vocabulary_sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    vocab_size: int
    vocabulary_sha256: str
    def __init__(self, name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., vocabulary_sha256: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "release", "model", "notes", "draft")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    release: str
    model: ModelIdentity
    notes: _containers.RepeatedScalarFieldContainer[str]
    draft: DraftTerms
    def __init__(self, protocol: _Optional[int] = ..., release: _Optional[str] = ..., model: _Optional[_Union[ModelIdentity, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ..., draft: _Optional[_Union[DraftTerms, _Mapping]] = ...) -> None: ...

class DraftTerms(_message.Message):
    __slots__ = ("max_draft_tokens", "max_context")
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    max_draft_tokens: int
    max_context: int
    def __init__(self, max_draft_tokens: _Optional[int] = ..., max_context: _Optional[int] = ...) -> None: ...

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
    def __init__(self, row: _Optional[int] = ..., base_length: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., num_draft_tokens: _Optional[int] = ..., end: _Optional[bool] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "num_prompt", "seed", "coupled", "deterministic", "vocab_size")
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
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
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
    vocab_size: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., num_prompt: _Optional[int] = ..., seed: _Optional[int] = ..., coupled: _Optional[bool] = ..., deterministic: _Optional[bool] = ..., vocab_size: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("token", "distribution")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    token: int
    distribution: Distribution
    def __init__(self, token: _Optional[int] = ..., distribution: _Optional[_Union[Distribution, _Mapping]] = ...) -> None: ...

class Distribution(_message.Message):
    __slots__ = ("tokens", "probs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., probs: _Optional[_Iterable[float]] = ...) -> None: ...
