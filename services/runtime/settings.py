"""Frozen configuration of the services. A docstring per field, read by the command line.

Knows no option parser: ``field_help`` gives a field's text, the dataclass its default.
``validate`` is called once, by whoever starts the process; nothing re-checks inside.
"""

import ast
import dataclasses
import inspect
import textwrap
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache

from engine.config import EngineConfig
from engine.order import Schedule
from protos import cluster_pb2
from services.runtime.address import check_bind
from services.runtime.certificates import TlsFiles
from services.runtime.errors import InvalidArgument, NotFound

MAX_PORT = 65_535
MAX_TRACES = 10_000


class Role(StrEnum):
    """What an instance does."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"

    @property
    def number(self) -> int:
        """The role in protos."""
        return int(cluster_pb2.Role.Value(f"ROLE_{self.name}"))

    @classmethod
    def from_number(cls, number: int) -> "Role":
        """Raises: InvalidArgument: no such role."""
        for role in cls:
            if role.number == number:
                return role
        raise InvalidArgument("role", "must be prefill, decode or colocated")


class PlacementPolicy(StrEnum):
    """Which of the instances that may take a request gets it."""

    RANDOM = "random"
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    LOCAL_PREFIX = "local_prefix"
    COST = "cost"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What a router is started with."""

    model: str
    """Path of a GGUF file or Hugging Face directory, hub id (org/name), or demo."""
    host: str = "127.0.0.1"
    """Address of the public gRPC and HTTP ports."""
    grpc_port: int = 50051
    """Public gRPC port; 0: any free one."""
    http_port: int = 8000
    """Public HTTP port (OpenAI API, health, metrics); 0: any free one."""
    internal_host: str = "127.0.0.1"
    """Address of the internal port, where instances register."""
    internal_port: int = 50052
    """Internal gRPC port, where instances register; 0: any free one."""
    disaggregate_from: int = 128
    """Prompts of at least so many uncached tokens are prefilled on a prefill instance."""
    placement: str = PlacementPolicy.COST
    """Which instance gets a request: random, round_robin, least_loaded, local_prefix (where least
    of the prompt is to compute) or cost (where it is predicted to finish first)."""
    ttft_slo_s: float = 0.0
    """Objective for the first token, in seconds: a burst of prompts that prefill instances cannot
    read in time is read by decode instances. 0: none."""
    tpot_slo_s: float = 0.0
    """Objective for each further token, in seconds: decode instances read no prompt where it would
    break it. 0: none."""
    max_wait_s: float = 30.0
    """A request whose prompt is predicted to wait longer is refused at once, in seconds."""
    max_requests: int = 1024
    """Most requests at once; more are refused with a hint when to retry."""
    trace_requests: int = 256
    """Finished requests of which `kvrelay trace` can show where their time went; 0: none."""
    launcher: str = ""
    """Where whoever keeps this cluster is asked for more or fewer instances; empty: nowhere."""
    tls_cert: str = ""
    """Certificate (PEM) of the public ports; empty: plain text."""
    tls_key: str = ""
    """Its private key."""
    tls_client_ca: str = ""
    """Who must have signed the clients' certificates; empty: clients need none."""
    api_keys: str = ""
    """File of API keys, a line each as `kvrelay key` prints it; empty: nobody needs one."""
    internal_tls_cert: str = ""
    """Certificate (PEM) that this process shows to the other parts of the cluster; empty: plain
    text between them."""
    internal_tls_key: str = ""
    """Its private key."""
    internal_tls_ca: str = ""
    """Who must have signed the certificates of the other parts: with it both ends are checked."""
    internal_tls_name: str = ""
    """Name that the other parts' certificates must have; empty: the host they are reached at."""
    insecure: bool = False
    """Allow addresses that other machines can reach, without encryption or keys."""
    drain_timeout_s: float = 30.0
    """How long a stopping router waits for running requests, in seconds."""

    def validate(self) -> None:
        """Raises: InvalidArgument: names the option."""
        _check_model(self.model)
        for name in ("grpc_port", "http_port", "internal_port"):
            _check_port(name, getattr(self, name))
        _check_distinct_ports(self)
        _check_at_least("disaggregate_from", self.disaggregate_from, 0)
        _check_choice("placement", self.placement, tuple(PlacementPolicy))
        _check_at_least("max_requests", self.max_requests, 1)
        _check_at_least("trace_requests", self.trace_requests, 0)
        if self.trace_requests > MAX_TRACES:
            raise InvalidArgument("--trace-requests", f"must not be more than {MAX_TRACES}")
        for name in ("ttft_slo_s", "tpot_slo_s"):
            _check_at_least(name, getattr(self, name), 0)
        if not self.max_wait_s > 0:
            raise InvalidArgument("--max-wait-s", "must be more than 0 seconds")
        _check_at_least("drain_timeout_s", self.drain_timeout_s, 0)
        self.public_tls.check("--tls")
        self.internal_tls.check("--internal-tls")
        check_bind(self.host, self.insecure or self.is_guarded, "--tls-cert and --api-keys")
        is_private = self.insecure or self.internal_tls.is_on
        check_bind(self.internal_host, is_private, "--internal-tls-cert")

    @property
    def public_tls(self) -> TlsFiles:
        """What the public ports show, and want to see."""
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def is_guarded(self) -> bool:
        """The public ports are encrypted, and know whom they serve."""
        return self.public_tls.is_on and bool(self.api_keys or self.tls_client_ca)

    @property
    def internal_tls(self) -> TlsFiles:
        """What the parts of the cluster show each other."""
        return TlsFiles(
            self.internal_tls_cert,
            self.internal_tls_key,
            self.internal_tls_ca,
            self.internal_tls_name,
        )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What one instance is started with."""

    model: str
    """Path of a GGUF file or Hugging Face directory, hub id (org/name), or demo."""
    role: Role
    """What the instance does: prefill, decode or colocated."""
    router: str
    """Internal address of the router, host:port; of several, separated by commas."""
    host: str = "127.0.0.1"
    """Address of the instance's internal port and of its metrics port."""
    port: int = 0
    """Internal gRPC port; 0: any free one."""
    advertise_host: str = ""
    """Host name under which others reach this instance; empty: the address it binds."""
    metrics_port: int = 0
    """Port of the Prometheus metrics; 0: any free one."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The engine's configuration."""
    transport: str = "auto"
    """How KV bytes move: auto (shared memory on one host, else gRPC), grpc or shared_memory."""
    transport_throttle: int = 0
    """Bytes a second at which a source may send KV, for experiments; 0: as fast as it goes."""
    transport_latency_ms: float = 0.0
    """Milliseconds by which all that a source sends is late, for experiments."""
    internal_tls_cert: str = ""
    """Certificate (PEM) that this process shows to the other parts of the cluster; empty: plain
    text between them."""
    internal_tls_key: str = ""
    """Its private key."""
    internal_tls_ca: str = ""
    """Who must have signed the certificates of the other parts: with it both ends are checked."""
    internal_tls_name: str = ""
    """Name that the other parts' certificates must have; empty: the host they are reached at."""
    insecure: bool = False
    """Allow addresses that other machines can reach, without encryption."""
    drain_timeout_s: float = 30.0
    """How long a stopping instance waits for running requests, in seconds."""

    @property
    def routers(self) -> tuple[str, ...]:
        """The addresses in ``router``."""
        return tuple(address.strip() for address in self.router.split(","))

    def validate(self) -> None:
        """Raises: InvalidArgument: names the option."""
        _check_model(self.model)
        for address in self.routers:
            _check_address("router", address)
        _check_port("port", self.port)
        _check_port("metrics_port", self.metrics_port)
        _check_choice("transport", self.transport, ("auto", "grpc", "shared_memory"))
        _check_at_least("transport_throttle", self.transport_throttle, 0)
        _check_at_least("transport_latency_ms", self.transport_latency_ms, 0)
        _check_at_least("drain_timeout_s", self.drain_timeout_s, 0)
        self.internal_tls.check("--internal-tls")
        check_bind(self.host, self.insecure or self.internal_tls.is_on, "--internal-tls-cert")
        validate_engine(self.engine)

    @property
    def internal_tls(self) -> TlsFiles:
        """What the parts of the cluster show each other."""
        return TlsFiles(
            self.internal_tls_cert,
            self.internal_tls_key,
            self.internal_tls_ca,
            self.internal_tls_name,
        )


_AT_LEAST_ONE = (
    "block_size",
    "threads",
    "token_budget",
    "max_prefill_batch",
    "max_decode_sequences",
    "max_consecutive_prefill_steps",
)


def validate_engine(engine: EngineConfig) -> None:
    """Check what can be checked without a model or a device.

    Raises:
        InvalidArgument: names the option.
    """
    _check_choice("device", engine.device, ("auto", "cpu", "cuda"))
    _check_choice("dtype", engine.dtype, ("auto", "float32", "bfloat16"))
    _check_choice("kv_dtype", engine.kv_dtype, ("auto", "int8"))
    _check_choice("schedule", engine.schedule, tuple(Schedule))
    if engine.deterministic and engine.kernels == "torch":
        raise InvalidArgument("--deterministic", "needs the native kernels: use --kernels auto")
    for name in _AT_LEAST_ONE:
        _check_at_least(name, getattr(engine, name), 1)
    least = engine.max_decode_sequences + engine.block_size
    if engine.token_budget < least:
        raise InvalidArgument(
            "--token-budget",
            f"{engine.token_budget} is less than --max-decode-sequences + --block-size = {least}",
        )
    for name in ("kv_cache_bytes", "max_context"):
        _check_at_least(name, getattr(engine, name), 0)
    if not engine.max_step_s > 0:
        raise InvalidArgument("--max-step-s", "must be more than 0 seconds")


@cache
def _docstrings(cls: type) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def field_help(cls: type, name: str) -> str:
    """The docstring below field ``name`` of a config dataclass.

    Raises:
        NotFound: the class has no such field, or the field no docstring.
    """
    text = _docstrings(cls).get(name)
    if text is None:
        raise NotFound(f"{cls.__name__}.{name} has no docstring")
    return text


def field_default(cls: type, name: str) -> object:
    """The default of field ``name`` of a config dataclass.

    Raises:
        NotFound: the class has no such field, or the field no default.
    """
    assert dataclasses.is_dataclass(cls)
    for each in dataclasses.fields(cls):
        if each.name == name and each.default is not dataclasses.MISSING:
            return each.default
    raise NotFound(f"{cls.__name__}.{name} has no default")


def option_name(name: str) -> str:
    """A field as the command line spells it."""
    return "--" + name.replace("_", "-")


def _check_model(model: str) -> None:
    if not model.strip():
        raise InvalidArgument("MODEL", "is empty: give a GGUF file, a directory or demo")


def _check_port(name: str, port: int) -> None:
    if not 0 <= port <= MAX_PORT:
        raise InvalidArgument(option_name(name), f"{port} is not a port (0 to {MAX_PORT})")


def _check_distinct_ports(config: RouterConfig) -> None:
    taken = [(config.host, config.grpc_port), (config.host, config.http_port)]
    taken.append((config.internal_host, config.internal_port))
    fixed = [each for each in taken if each[1] != 0]
    if len(set(fixed)) < len(fixed):
        raise InvalidArgument("--grpc-port", "the gRPC, HTTP and internal ports must differ")


def _check_at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise InvalidArgument(option_name(name), f"{value} is less than {least}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgument(option_name(name), f"{value!r} is none of {', '.join(choices)}")


def _check_address(name: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= MAX_PORT:
        raise InvalidArgument(option_name(name), f"{address!r} is not HOST:PORT")
