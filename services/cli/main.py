"""The command line: ``kvrelay serve | generate | status | router | worker | demo``.

Parses options into the frozen configs and hands over; what fails becomes one line on stderr and
an exit code here, and nowhere else. A command's code is imported when it is called, so that
``--help`` and a client start at once.
"""

import asyncio
import sys
from typing import Annotated

import typer

from engine.config import EngineConfig
from services.cli import operators, options, trace
from services.cli.options import ADDRESS, ENGINE, ROUTER, field_option
from services.launch.place import LaunchError
from services.runtime.errors import to_service_error
from services.runtime.settings import Role, RouterConfig, WorkerConfig, field_help

app = typer.Typer(
    name="kvrelay",
    help="Serve a language model on prefill and decode instances that hand over the KV cache.",
    add_completion=False,
    rich_markup_mode="markdown",
)
app.add_typer(operators.app)
STANDALONE_WORKER = WorkerConfig(model="demo", role=Role.COLOCATED, router="127.0.0.1:50052")

Count = Annotated[int, typer.Option(metavar="N", help="Instances of this role.")]


@app.command()
def serve(
    model: options.Model,
    prefill: Count = 0,
    decode: Count = 0,
    colocated: Count = 0,
    launcher: Annotated[
        str, typer.Option(metavar="local|ray", help="What places the instances.")
    ] = "local",
    ray_address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT|auto",
            envvar="RAY_ADDRESS",
            help="With --launcher ray: the Ray cluster to join; empty: a private one, here.",
        ),
    ] = "",
    device: options.Device = ENGINE.device,
    dtype: options.Dtype = ENGINE.dtype,
    kv_dtype: options.KvDtype = ENGINE.kv_dtype,
    weights: options.Weights = ENGINE.weights,
    kernels: options.Kernels = ENGINE.kernels,
    deterministic: options.Deterministic = ENGINE.deterministic,
    transport: options.Transport = STANDALONE_WORKER.transport,
    threads: Annotated[
        int | None,
        field_option(EngineConfig, "threads", metavar="N", show_default="cores / instances"),
    ] = None,
    kv_cache_bytes: options.KvCacheBytes = ENGINE.kv_cache_bytes,
    block_size: options.BlockSize = ENGINE.block_size,
    max_context: options.MaxContext = ENGINE.max_context,
    schedule: options.Schedule = ENGINE.schedule,
    token_budget: options.TokenBudget = ENGINE.token_budget,
    max_prefill_batch: options.MaxPrefillBatch = ENGINE.max_prefill_batch,
    max_decode_sequences: options.MaxDecodeSequences = ENGINE.max_decode_sequences,
    max_consecutive_prefill_steps: options.MaxConsecutivePrefillSteps = (
        ENGINE.max_consecutive_prefill_steps
    ),
    disaggregate_from: options.DisaggregateFrom = ROUTER.disaggregate_from,
    placement: options.Placement = ROUTER.placement,
    ttft_slo_s: options.TtftSlo = ROUTER.ttft_slo_s,
    tpot_slo_s: options.TpotSlo = ROUTER.tpot_slo_s,
    max_wait_s: options.MaxWait = ROUTER.max_wait_s,
    trace_requests: options.TraceRequests = ROUTER.trace_requests,
    host: options.Host = ROUTER.host,
    grpc_port: options.GrpcPort = ROUTER.grpc_port,
    http_port: options.HttpPort = ROUTER.http_port,
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    tls_client_ca: options.TlsClientCa = "",
    api_keys: options.ApiKeys = "",
    internal_tls_cert: options.InternalTlsCert = "",
    internal_tls_key: options.InternalTlsKey = "",
    internal_tls_ca: options.InternalTlsCa = "",
    internal_tls_name: options.InternalTlsName = "",
    insecure: options.Insecure = ROUTER.insecure,
    log_format: options.LogFormat = options.LOG_FORMAT,
) -> None:
    """Keep a whole cluster up on this machine: a router and its instances.

    Without --prefill, --decode or --colocated: one prefill and one decode instance. When all is
    up, stdout says `ready grpc=HOST:PORT http=HOST:PORT`. Ctrl-C drains and stops, twice at once.
    """
    from engine.loaders.hub import fetch, is_hub_id
    from services.cli import serve as cluster

    if is_hub_id(model):
        fetch(model)  # once, before every process opens it
    roles = cluster.Counts(prefill, decode, colocated).roles()
    if threads is None:
        threads = max(1, cluster.num_cores() // len(roles))
    engine = EngineConfig(
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        weights=weights,
        kernels=kernels,
        deterministic=deterministic,
        block_size=block_size,
        kv_cache_bytes=kv_cache_bytes,
        max_context=max_context,
        schedule=schedule,
        token_budget=token_budget,
        max_prefill_batch=max_prefill_batch,
        max_decode_sequences=max_decode_sequences,
        max_consecutive_prefill_steps=max_consecutive_prefill_steps,
        threads=threads,
    )
    router = RouterConfig(
        model=model,
        host=host,
        grpc_port=grpc_port,
        http_port=http_port,
        internal_host=cluster.internal_host(launcher, ray_address, insecure),
        disaggregate_from=disaggregate_from,
        placement=placement,
        ttft_slo_s=ttft_slo_s,
        tpot_slo_s=tpot_slo_s,
        max_wait_s=max_wait_s,
        trace_requests=trace_requests,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        api_keys=api_keys,
        internal_tls_cert=internal_tls_cert,
        internal_tls_key=internal_tls_key,
        internal_tls_ca=internal_tls_ca,
        internal_tls_name=internal_tls_name,
        insecure=insecure,
    )
    plan = cluster.make_plan(router, roles, engine, transport)
    launch = cluster.launcher_by_name(launcher, plan, engine, ray_address)
    cluster.serve_until_stopped(plan, launch)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT|-", help="The prompt; - reads stdin.")],
    address: options.Address = ADDRESS,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in the model's chat format.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 always takes the likeliest token; 1 samples as trained.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**64 - 1, help="Makes sampling repeatable.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Ends the answer before this text; repeatable.")
    ] = None,
    as_json: options.AsJson = False,
    timeline: Annotated[
        bool | None,
        typer.Option(help="Draw on stderr where the time went.", show_default="on a terminal"),
    ] = None,
) -> None:
    """Ask a running cluster; the answer is streamed to stdout."""
    from services.cli import generate as command

    text = sys.stdin.read() if prompt == "-" else prompt
    ask = command.Ask(text, chat, max_tokens, temperature, seed, tuple(stop or ()))
    if timeline is None:
        timeline = sys.stderr.isatty() and not as_json
    command.run(address, ask, as_json=as_json, show_timeline=timeline)


@app.command()
def status(address: options.Address = ADDRESS, as_json: options.AsJson = False) -> None:
    """Show the instances of a running cluster and how full they are."""
    from services.cli import status as command

    command.run(address, as_json=as_json)


app.command("trace")(trace.command)


@app.command()
def router(
    model: options.ServedModel = ROUTER.model,
    host: options.Host = ROUTER.host,
    grpc_port: options.GrpcPort = ROUTER.grpc_port,
    http_port: options.HttpPort = ROUTER.http_port,
    internal_host: Annotated[
        str, field_option(RouterConfig, "internal_host", metavar="H")
    ] = ROUTER.internal_host,
    internal_port: Annotated[
        int, field_option(RouterConfig, "internal_port", metavar="P")
    ] = ROUTER.internal_port,
    disaggregate_from: options.DisaggregateFrom = ROUTER.disaggregate_from,
    placement: options.Placement = ROUTER.placement,
    ttft_slo_s: options.TtftSlo = ROUTER.ttft_slo_s,
    tpot_slo_s: options.TpotSlo = ROUTER.tpot_slo_s,
    max_wait_s: options.MaxWait = ROUTER.max_wait_s,
    trace_requests: options.TraceRequests = ROUTER.trace_requests,
    max_requests: Annotated[
        int, field_option(RouterConfig, "max_requests", metavar="N")
    ] = ROUTER.max_requests,
    drain_timeout_s: Annotated[
        float, field_option(RouterConfig, "drain_timeout_s", metavar="SECONDS")
    ] = ROUTER.drain_timeout_s,
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    tls_client_ca: options.TlsClientCa = "",
    api_keys: options.ApiKeys = "",
    internal_tls_cert: options.InternalTlsCert = "",
    internal_tls_key: options.InternalTlsKey = "",
    internal_tls_ca: options.InternalTlsCa = "",
    internal_tls_name: options.InternalTlsName = "",
    insecure: options.Insecure = ROUTER.insecure,
    log_format: options.LogFormat = options.LOG_FORMAT,
) -> None:
    """Run a router alone, as an orchestrator starts it. Needs KVRELAY_CLUSTER_TOKEN."""
    _run_alone(
        RouterConfig(
            model=model,
            host=host,
            grpc_port=grpc_port,
            http_port=http_port,
            internal_host=internal_host,
            internal_port=internal_port,
            disaggregate_from=disaggregate_from,
            placement=placement,
            ttft_slo_s=ttft_slo_s,
            tpot_slo_s=tpot_slo_s,
            max_wait_s=max_wait_s,
            trace_requests=trace_requests,
            max_requests=max_requests,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_client_ca=tls_client_ca,
            api_keys=api_keys,
            internal_tls_cert=internal_tls_cert,
            internal_tls_key=internal_tls_key,
            internal_tls_ca=internal_tls_ca,
            internal_tls_name=internal_tls_name,
            insecure=insecure,
            drain_timeout_s=drain_timeout_s,
        )
    )


@app.command()
def worker(
    role: Annotated[
        Role,
        field_option(WorkerConfig, "role", metavar="prefill|decode|colocated"),
    ],
    router: Annotated[str, field_option(WorkerConfig, "router", metavar="HOST:PORT")],
    model: options.ServedModel = ROUTER.model,
    host: Annotated[str, field_option(WorkerConfig, "host", metavar="H")] = STANDALONE_WORKER.host,
    port: Annotated[int, field_option(WorkerConfig, "port", metavar="P")] = STANDALONE_WORKER.port,
    advertise_host: Annotated[
        str, field_option(WorkerConfig, "advertise_host", metavar="H")
    ] = STANDALONE_WORKER.advertise_host,
    metrics_port: Annotated[
        int, field_option(WorkerConfig, "metrics_port", metavar="P")
    ] = STANDALONE_WORKER.metrics_port,
    device: options.Device = ENGINE.device,
    dtype: options.Dtype = ENGINE.dtype,
    kv_dtype: options.KvDtype = ENGINE.kv_dtype,
    weights: options.Weights = ENGINE.weights,
    kernels: options.Kernels = ENGINE.kernels,
    deterministic: options.Deterministic = ENGINE.deterministic,
    transport: options.Transport = STANDALONE_WORKER.transport,
    transport_throttle: Annotated[
        int,
        field_option(WorkerConfig, "transport_throttle", parser=options.parse_size, metavar="SIZE"),
    ] = STANDALONE_WORKER.transport_throttle,
    transport_latency_ms: Annotated[
        float, field_option(WorkerConfig, "transport_latency_ms", metavar="MS")
    ] = STANDALONE_WORKER.transport_latency_ms,
    threads: Annotated[int, field_option(EngineConfig, "threads", metavar="N")] = ENGINE.threads,
    kv_cache_bytes: options.KvCacheBytes = ENGINE.kv_cache_bytes,
    block_size: options.BlockSize = ENGINE.block_size,
    max_context: options.MaxContext = ENGINE.max_context,
    schedule: options.Schedule = ENGINE.schedule,
    token_budget: options.TokenBudget = ENGINE.token_budget,
    max_prefill_batch: options.MaxPrefillBatch = ENGINE.max_prefill_batch,
    max_decode_sequences: options.MaxDecodeSequences = ENGINE.max_decode_sequences,
    max_consecutive_prefill_steps: options.MaxConsecutivePrefillSteps = (
        ENGINE.max_consecutive_prefill_steps
    ),
    drain_timeout_s: Annotated[
        float, field_option(WorkerConfig, "drain_timeout_s", metavar="SECONDS")
    ] = STANDALONE_WORKER.drain_timeout_s,
    internal_tls_cert: options.InternalTlsCert = "",
    internal_tls_key: options.InternalTlsKey = "",
    internal_tls_ca: options.InternalTlsCa = "",
    internal_tls_name: options.InternalTlsName = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", help=field_help(WorkerConfig, "insecure"))
    ] = STANDALONE_WORKER.insecure,
    log_format: options.LogFormat = options.LOG_FORMAT,
) -> None:
    """Run one instance alone, as an orchestrator starts it. Needs KVRELAY_CLUSTER_TOKEN."""
    engine = EngineConfig(
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        weights=weights,
        kernels=kernels,
        deterministic=deterministic,
        block_size=block_size,
        kv_cache_bytes=kv_cache_bytes,
        max_context=max_context,
        schedule=schedule,
        token_budget=token_budget,
        max_prefill_batch=max_prefill_batch,
        max_decode_sequences=max_decode_sequences,
        max_consecutive_prefill_steps=max_consecutive_prefill_steps,
        threads=threads,
    )
    _run_alone(
        WorkerConfig(
            model=model,
            role=role,
            router=router,
            host=host,
            port=port,
            advertise_host=advertise_host,
            metrics_port=metrics_port,
            engine=engine,
            transport=transport,
            transport_throttle=transport_throttle,
            transport_latency_ms=transport_latency_ms,
            internal_tls_cert=internal_tls_cert,
            internal_tls_key=internal_tls_key,
            internal_tls_ca=internal_tls_ca,
            internal_tls_name=internal_tls_name,
            insecure=insecure,
            drain_timeout_s=drain_timeout_s,
        )
    )


@app.command()
def demo(model: options.ServedModel = ROUTER.model) -> None:
    """Start a cluster, stream one answer, show where its time went, stop."""
    from services.cli import demo as command

    command.run(model)


def _run_alone(config: RouterConfig | WorkerConfig) -> None:
    from services.launch.service import ready_line, run_service
    from services.runtime import journal

    config.validate()
    journal.configure()
    asyncio.run(run_service(config, lambda where: print(ready_line(where), flush=True)))


def run(arguments: list[str]) -> int:
    """Run one command; the exit code. A failure is one line on stderr."""
    try:
        return app(arguments, prog_name="kvrelay", standalone_mode=False) or 0
    except typer.TyperException as error:
        code, reason = error.exit_code, f"{error.format_message().rstrip('.')} (see kvrelay --help)"
    except LaunchError as error:
        code, reason = 1, str(error)
    except Exception as error:
        code, reason = 1, str(to_service_error(error))
    print(f"kvrelay: {' '.join(reason.split())}", file=sys.stderr)
    return code


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
