from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ControlFrame(_message.Message):
    __slots__ = ("hello", "offer", "grant", "wait", "refuse", "first", "sent", "landed", "cancel", "cancelled", "renew")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    offer: Offer
    grant: Grant
    wait: Wait
    refuse: Refuse
    first: First
    sent: Sent
    landed: Landed
    cancel: Cancel
    cancelled: Cancelled
    renew: Renew
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., wait: _Optional[_Union[Wait, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ..., first: _Optional[_Union[First, _Mapping]] = ..., sent: _Optional[_Union[Sent, _Mapping]] = ..., landed: _Optional[_Union[Landed, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., cancelled: _Optional[_Union[Cancelled, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("wire_version", "source_instance_id", "target_instance_id", "model_digest", "kv_layout", "shared_memory", "transport", "transport_reason")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_REASON_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    source_instance_id: str
    target_instance_id: str
    model_digest: str
    kv_layout: KvLayout
    shared_memory: SharedMemory
    transport: str
    transport_reason: str
    def __init__(self, wire_version: _Optional[int] = ..., source_instance_id: _Optional[str] = ..., target_instance_id: _Optional[str] = ..., model_digest: _Optional[str] = ..., kv_layout: _Optional[_Union[KvLayout, _Mapping]] = ..., shared_memory: _Optional[_Union[SharedMemory, _Mapping]] = ..., transport: _Optional[str] = ..., transport_reason: _Optional[str] = ...) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ("pid", "fd", "num_bytes", "token")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    num_bytes: int
    token: bytes
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., num_bytes: _Optional[int] = ..., token: _Optional[bytes] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("dtype", "num_layers", "num_kv_heads", "head_dim", "block_size", "order")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    order: str
    def __init__(self, dtype: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., order: _Optional[str] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("handoff_id", "request_id", "num_tokens", "block_hashes")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    request_id: str
    num_tokens: int
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, handoff_id: _Optional[bytes] = ..., request_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("handoff_id", "num_held_tokens")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    num_held_tokens: int
    def __init__(self, handoff_id: _Optional[bytes] = ..., num_held_tokens: _Optional[int] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("handoff_id",)
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    def __init__(self, handoff_id: _Optional[bytes] = ...) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("handoff_id", "reason")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    reason: str
    def __init__(self, handoff_id: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class First(_message.Message):
    __slots__ = ("handoff_id", "position", "token_id", "num_cached_tokens", "details")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    position: int
    token_id: int
    num_cached_tokens: int
    details: bytes
    def __init__(self, handoff_id: _Optional[bytes] = ..., position: _Optional[int] = ..., token_id: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., details: _Optional[bytes] = ...) -> None: ...

class Sent(_message.Message):
    __slots__ = ("handoff_id", "num_frames", "num_bytes", "first")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    num_frames: int
    num_bytes: int
    first: First
    def __init__(self, handoff_id: _Optional[bytes] = ..., num_frames: _Optional[int] = ..., num_bytes: _Optional[int] = ..., first: _Optional[_Union[First, _Mapping]] = ...) -> None: ...

class Landed(_message.Message):
    __slots__ = ("handoff_id",)
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    def __init__(self, handoff_id: _Optional[bytes] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handoff_id", "reason")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    reason: str
    def __init__(self, handoff_id: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class Cancelled(_message.Message):
    __slots__ = ("handoff_id",)
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    def __init__(self, handoff_id: _Optional[bytes] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("handoff_ids",)
    HANDOFF_IDS_FIELD_NUMBER: _ClassVar[int]
    handoff_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, handoff_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...
