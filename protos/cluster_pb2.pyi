from protos import kv_transfer_pb2 as _kv_transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_COLOCATED: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_COLOCATED: Role

class DrainRequest(_message.Message):
    __slots__ = ("now", "undo")
    NOW_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    now: bool
    undo: bool
    def __init__(self, now: _Optional[bool] = ..., undo: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: Role
    def __init__(self, role: _Optional[_Union[Role, str]] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("prefill", "decode", "colocated")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    COLOCATED_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    colocated: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., colocated: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("instance_id", "role", "address", "metrics_address", "model", "model_digest", "kv_layout", "max_context", "max_sequence_tokens", "load", "max_gap_s")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    MAX_GAP_S_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    role: Role
    address: str
    metrics_address: str
    model: str
    model_digest: str
    kv_layout: _kv_transfer_pb2.KvLayout
    max_context: int
    max_sequence_tokens: int
    load: InstanceLoad
    max_gap_s: float
    def __init__(self, instance_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ..., kv_layout: _Optional[_Union[_kv_transfer_pb2.KvLayout, _Mapping]] = ..., max_context: _Optional[int] = ..., max_sequence_tokens: _Optional[int] = ..., load: _Optional[_Union[InstanceLoad, _Mapping]] = ..., max_gap_s: _Optional[float] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("heartbeat_interval_s",)
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    heartbeat_interval_s: float
    def __init__(self, heartbeat_interval_s: _Optional[float] = ...) -> None: ...

class InstanceLoad(_message.Message):
    __slots__ = ("blocks_total", "blocks_free", "blocks_cached", "blocks_held", "blocks_quarantined", "requests_running", "requests_waiting", "handoffs_active", "draining", "prompt_tokens_waiting")
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_WAITING_FIELD_NUMBER: _ClassVar[int]
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_quarantined: int
    requests_running: int
    requests_waiting: int
    handoffs_active: int
    draining: bool
    prompt_tokens_waiting: int
    def __init__(self, blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_held: _Optional[int] = ..., blocks_quarantined: _Optional[int] = ..., requests_running: _Optional[int] = ..., requests_waiting: _Optional[int] = ..., handoffs_active: _Optional[int] = ..., draining: _Optional[bool] = ..., prompt_tokens_waiting: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("instance_id", "load", "cache_news")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CACHE_NEWS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    load: InstanceLoad
    cache_news: CacheNews
    def __init__(self, instance_id: _Optional[str] = ..., load: _Optional[_Union[InstanceLoad, _Mapping]] = ..., cache_news: _Optional[_Union[CacheNews, _Mapping]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("known", "cache_sequence")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    CACHE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    known: bool
    cache_sequence: int
    def __init__(self, known: _Optional[bool] = ..., cache_sequence: _Optional[int] = ...) -> None: ...

class CacheNews(_message.Message):
    __slots__ = ("next_sequence", "is_whole", "stored", "removed")
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    next_sequence: int
    is_whole: bool
    stored: bytes
    removed: bytes
    def __init__(self, next_sequence: _Optional[int] = ..., is_whole: _Optional[bool] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("instance_id",)
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    def __init__(self, instance_id: _Optional[str] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InstanceStatus(_message.Message):
    __slots__ = ("instance_id", "role", "address", "state", "load", "metrics_address")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    role: Role
    address: str
    state: str
    load: InstanceLoad
    metrics_address: str
    def __init__(self, instance_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., load: _Optional[_Union[InstanceLoad, _Mapping]] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("model", "instances", "launcher")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    LAUNCHER_FIELD_NUMBER: _ClassVar[int]
    model: str
    instances: _containers.RepeatedCompositeFieldContainer[InstanceStatus]
    launcher: str
    def __init__(self, model: _Optional[str] = ..., instances: _Optional[_Iterable[_Union[InstanceStatus, _Mapping]]] = ..., launcher: _Optional[str] = ...) -> None: ...
