from protos import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "priority", "output_token_ids", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingParams
    priority: int
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class StopWork(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class PrefillCommand(_message.Message):
    __slots__ = ("start", "abort")
    START_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    start: StartPrefill
    abort: StopWork
    def __init__(self, start: _Optional[_Union[StartPrefill, _Mapping]] = ..., abort: _Optional[_Union[StopWork, _Mapping]] = ...) -> None: ...

class StartPrefill(_message.Message):
    __slots__ = ("request", "handoff_id", "target_address", "target_instance_id", "wants_trace")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TARGET_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    WANTS_TRACE_FIELD_NUMBER: _ClassVar[int]
    request: WorkRequest
    handoff_id: bytes
    target_address: str
    target_instance_id: str
    wants_trace: bool
    def __init__(self, request: _Optional[_Union[WorkRequest, _Mapping]] = ..., handoff_id: _Optional[bytes] = ..., target_address: _Optional[str] = ..., target_instance_id: _Optional[str] = ..., wants_trace: _Optional[bool] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("start", "abort")
    START_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    start: StartDecode
    abort: StopWork
    def __init__(self, start: _Optional[_Union[StartDecode, _Mapping]] = ..., abort: _Optional[_Union[StopWork, _Mapping]] = ...) -> None: ...

class StartDecode(_message.Message):
    __slots__ = ("request", "handoff_id", "source_instance_id")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    request: WorkRequest
    handoff_id: bytes
    source_instance_id: str
    def __init__(self, request: _Optional[_Union[WorkRequest, _Mapping]] = ..., handoff_id: _Optional[bytes] = ..., source_instance_id: _Optional[str] = ...) -> None: ...

class FirstDetails(_message.Message):
    __slots__ = ("logprobs", "others", "prompt_logprobs", "candidates")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    logprobs: _inference_pb2.TokenLogprobs
    others: _containers.RepeatedCompositeFieldContainer[FirstToken]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    candidates: _containers.RepeatedCompositeFieldContainer[BeamCandidate]
    def __init__(self, logprobs: _Optional[_Union[_inference_pb2.TokenLogprobs, _Mapping]] = ..., others: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., candidates: _Optional[_Iterable[_Union[BeamCandidate, _Mapping]]] = ...) -> None: ...

class BeamCandidate(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprobs: _inference_pb2.TokenLogprobs
    def __init__(self, token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_inference_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class PrefillEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[PrefillEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[PrefillEvent, _Mapping]]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("request_id", "started", "done", "failed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    started: PrefillStarted
    done: PrefillDone
    failed: WorkFailed
    def __init__(self, request_id: _Optional[str] = ..., started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ..., failed: _Optional[_Union[WorkFailed, _Mapping]] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("queue_s", "grant_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    GRANT_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    grant_s: float
    def __init__(self, queue_s: _Optional[float] = ..., grant_s: _Optional[float] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("prefill_s", "handoff_s", "handoff_hidden_ratio", "handoff_bytes", "computed_tokens", "cached_tokens", "skipped_tokens", "sends", "chunks")
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_HIDDEN_RATIO_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENDS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    prefill_s: float
    handoff_s: float
    handoff_hidden_ratio: float
    handoff_bytes: int
    computed_tokens: int
    cached_tokens: int
    skipped_tokens: int
    sends: LayerSends
    chunks: Chunks
    def __init__(self, prefill_s: _Optional[float] = ..., handoff_s: _Optional[float] = ..., handoff_hidden_ratio: _Optional[float] = ..., handoff_bytes: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., skipped_tokens: _Optional[int] = ..., sends: _Optional[_Union[LayerSends, _Mapping]] = ..., chunks: _Optional[_Union[Chunks, _Mapping]] = ...) -> None: ...

class LayerSends(_message.Message):
    __slots__ = ("layer", "written_s", "begin_s", "end_s")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_S_FIELD_NUMBER: _ClassVar[int]
    BEGIN_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    layer: _containers.RepeatedScalarFieldContainer[int]
    written_s: _containers.RepeatedScalarFieldContainer[float]
    begin_s: _containers.RepeatedScalarFieldContainer[float]
    end_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, layer: _Optional[_Iterable[int]] = ..., written_s: _Optional[_Iterable[float]] = ..., begin_s: _Optional[_Iterable[float]] = ..., end_s: _Optional[_Iterable[float]] = ...) -> None: ...

class Chunks(_message.Message):
    __slots__ = ("num_tokens", "end_s")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    end_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, num_tokens: _Optional[_Iterable[int]] = ..., end_s: _Optional[_Iterable[float]] = ...) -> None: ...

class DecodeEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DecodeEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[DecodeEvent, _Mapping]]] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("request_id", "tokens", "finished", "failed", "choice_finished")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FINISHED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: _inference_pb2.Tokens
    finished: DecodeFinished
    failed: WorkFailed
    choice_finished: _inference_pb2.ChoiceFinished
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[_Union[_inference_pb2.Tokens, _Mapping]] = ..., finished: _Optional[_Union[DecodeFinished, _Mapping]] = ..., failed: _Optional[_Union[WorkFailed, _Mapping]] = ..., choice_finished: _Optional[_Union[_inference_pb2.ChoiceFinished, _Mapping]] = ...) -> None: ...

class DecodeFinished(_message.Message):
    __slots__ = ("finish_reason", "stop_reason", "output_tokens", "cached_tokens", "queue_s", "prefill_s", "first_decode_s", "last")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_DECODE_S_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _inference_pb2.FinishReason
    stop_reason: str
    output_tokens: int
    cached_tokens: int
    queue_s: float
    prefill_s: float
    first_decode_s: float
    last: _inference_pb2.Tokens
    def __init__(self, finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., stop_reason: _Optional[str] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., first_decode_s: _Optional[float] = ..., last: _Optional[_Union[_inference_pb2.Tokens, _Mapping]] = ...) -> None: ...

class WorkFailed(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...
