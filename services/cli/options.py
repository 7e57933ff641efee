"""Options that several commands share. Their help is the docstring of the config field they set.

Defaults come from the same place: ``ENGINE`` and ``ROUTER`` are the configs with nothing said.
Knows no command.
"""

import os
import re
from typing import Annotated, Any

import typer

from engine.config import EngineConfig
from services.runtime import journal
from services.runtime.settings import RouterConfig, WorkerConfig, field_help, option_name

ENGINE = EngineConfig()
ROUTER = RouterConfig(model="demo")

UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
UNITS |= {f"{letter}i": 1024 ** (power + 1) for power, letter in enumerate("KMGT")}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes: ``512MiB``, ``1G`` or ``536870912``; units with an i are powers of 1024.

    Raises:
        typer.BadParameter: none of these.
    """
    match = SIZE.fullmatch(str(text).strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size: say for example 512MiB, 1G or 536870912")
    unit = (match[2] or "").replace("I", "i")
    return int(float(match[1]) * UNITS[unit[:1].upper() + unit[1:]])


def field_option(cls: type, name: str, **settings: Any) -> Any:
    """The option that sets field ``name`` of a config dataclass."""
    return typer.Option(option_name(name), help=field_help(cls, name), **settings)


Model = Annotated[str, typer.Argument(metavar="MODEL", help=field_help(RouterConfig, "model"))]
ServedModel = Annotated[
    str,
    typer.Argument(metavar="MODEL", envvar="KVRELAY_MODEL", help=field_help(RouterConfig, "model")),
]

Host = Annotated[str, field_option(RouterConfig, "host", metavar="H")]
GrpcPort = Annotated[int, field_option(RouterConfig, "grpc_port", metavar="P")]
HttpPort = Annotated[int, field_option(RouterConfig, "http_port", metavar="P")]
DisaggregateFrom = Annotated[int, field_option(RouterConfig, "disaggregate_from", metavar="TOKENS")]
Placement = Annotated[
    str,
    field_option(
        RouterConfig, "placement", metavar="random|round_robin|least_loaded|local_prefix|cost"
    ),
]
TtftSlo = Annotated[float, field_option(RouterConfig, "ttft_slo_s", metavar="SECONDS")]
TpotSlo = Annotated[float, field_option(RouterConfig, "tpot_slo_s", metavar="SECONDS")]
MaxWait = Annotated[float, field_option(RouterConfig, "max_wait_s", metavar="SECONDS")]
Insecure = Annotated[bool, typer.Option("--insecure", help=field_help(RouterConfig, "insecure"))]

TraceRequests = Annotated[int, field_option(RouterConfig, "trace_requests", metavar="N")]


def _set_log_format(name: str) -> str:
    """For this process and those that it starts."""
    if name not in journal.FORMATS:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(journal.FORMATS)}")
    os.environ[journal.FORMAT_VARIABLE] = name
    return name


LogFormat = Annotated[
    str,
    typer.Option(
        "--log-format",
        metavar="text|json",
        envvar=journal.FORMAT_VARIABLE,
        callback=_set_log_format,
        help="How a line of the log looks.",
    ),
]
LOG_FORMAT = "text"
TlsCert = Annotated[str, field_option(RouterConfig, "tls_cert", metavar="FILE")]
TlsKey = Annotated[str, field_option(RouterConfig, "tls_key", metavar="FILE")]
TlsClientCa = Annotated[str, field_option(RouterConfig, "tls_client_ca", metavar="FILE")]
ApiKeys = Annotated[
    str, field_option(RouterConfig, "api_keys", metavar="FILE", envvar="KVRELAY_API_KEYS")
]
InternalTlsCert = Annotated[
    str,
    field_option(
        RouterConfig, "internal_tls_cert", envvar="KVRELAY_INTERNAL_TLS_CERT", metavar="FILE"
    ),
]
InternalTlsKey = Annotated[
    str,
    field_option(
        RouterConfig, "internal_tls_key", envvar="KVRELAY_INTERNAL_TLS_KEY", metavar="FILE"
    ),
]
InternalTlsCa = Annotated[
    str,
    field_option(RouterConfig, "internal_tls_ca", envvar="KVRELAY_INTERNAL_TLS_CA", metavar="FILE"),
]
InternalTlsName = Annotated[
    str,
    field_option(
        RouterConfig, "internal_tls_name", envvar="KVRELAY_INTERNAL_TLS_NAME", metavar="NAME"
    ),
]

Device = Annotated[str, field_option(EngineConfig, "device", metavar="auto|cpu|cuda")]
Dtype = Annotated[str, field_option(EngineConfig, "dtype", metavar="auto|float32|bfloat16")]
KvDtype = Annotated[str, field_option(EngineConfig, "kv_dtype", metavar="auto|int8")]
Weights = Annotated[
    str, field_option(EngineConfig, "weights", metavar="auto|float32|bf16|int8|file")
]
Kernels = Annotated[str, field_option(EngineConfig, "kernels", metavar="auto|torch")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help=field_help(EngineConfig, "deterministic"))
]
KvCacheBytes = Annotated[
    int, field_option(EngineConfig, "kv_cache_bytes", parser=parse_size, metavar="SIZE")
]
BlockSize = Annotated[int, field_option(EngineConfig, "block_size", metavar="TOKENS")]
Schedule = Annotated[
    str, field_option(EngineConfig, "schedule", metavar="decode_first|prefill_first")
]
TokenBudget = Annotated[int, field_option(EngineConfig, "token_budget", metavar="TOKENS")]
MaxPrefillBatch = Annotated[int, field_option(EngineConfig, "max_prefill_batch", metavar="N")]
MaxDecodeSequences = Annotated[int, field_option(EngineConfig, "max_decode_sequences", metavar="N")]
MaxConsecutivePrefillSteps = Annotated[
    int, field_option(EngineConfig, "max_consecutive_prefill_steps", metavar="N")
]
MaxContext = Annotated[int, field_option(EngineConfig, "max_context", metavar="TOKENS")]
Transport = Annotated[
    str, field_option(WorkerConfig, "transport", metavar="auto|grpc|shared_memory")
]

Address = Annotated[
    str,
    typer.Option("--address", envvar="KVRELAY_ADDRESS", help="Public gRPC address of a router."),
]
ADDRESS = f"{ROUTER.host}:{ROUTER.grpc_port}"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
