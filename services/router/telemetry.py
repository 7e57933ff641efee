"""Traces as OpenTelemetry spans, sent by OTLP where the environment says so; else nothing.

Its own variables decide: ``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``
turns it on, ``OTEL_SDK_DISABLED=true`` and ``OTEL_TRACES_EXPORTER=none`` off; the exporter reads
the rest. The SDK is imported only when it is on, and exports on a thread of its own. Spans have the
attributes of the GenAI conventions and no text. Opened and closed by ``app``.
"""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from services.router.trace import Span, Trace
from services.runtime.errors import FailedPrecondition

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

NANOSECONDS = 1e9
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
FINISHED = ("stop", "length", "abort")
"""Outcomes that are no errors."""


def is_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether the environment wants traces to be sent."""
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp")
    return any(map(environment.get, ENDPOINTS)) and not is_off and exporter != "none"


class Telemetry:
    """Emits traces through one provider, which it shuts down in the end."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("kvrelay")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def open(cls) -> "Telemetry | None":
        """What the environment asks for.

        Raises:
            FailedPrecondition: it asks for traces, and the SDK is not installed.
        """
        if not is_asked_for(os.environ):
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise FailedPrecondition(
                "traces are asked for by OTEL_EXPORTER_OTLP_ENDPOINT, and OpenTelemetry is not "
                "installed: pip install 'kvrelay[traces]'"
            ) from None
        name = os.environ.get("OTEL_SERVICE_NAME", "kvrelay")
        provider = TracerProvider(
            resource=Resource.create({"service.name": name}), shutdown_on_exit=False
        )
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def tell(self, trace: Trace) -> None:
        """Emit the spans of one request, as children of its client's."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        whole, *parts = trace.spans
        moment = _moments(trace.received_unix_s)
        root = self._tracer.start_span(
            f"{trace.origin.operation} {trace.model}",
            self._parent(trace),
            SpanKind.SERVER,
            attributes=_conventional(trace),
            start_time=moment(whole.start_s),
        )
        inside = set_span_in_context(root)
        for part in parts:
            self._emit(part, trace, inside, moment)
        if "error.type" in _conventional(trace):
            root.set_status(Status(StatusCode.ERROR, trace.outcome))
        root.end(moment(whole.end_s))

    def close(self) -> None:
        """Send what is left, and stop."""
        self._provider.shutdown()

    def _parent(self, trace: Trace) -> "Context":
        carrier = {"traceparent": trace.origin.traceparent, "tracestate": trace.origin.tracestate}
        return self._propagator.extract({name: value for name, value in carrier.items() if value})

    def _emit(
        self, part: Span, trace: Trace, inside: "Context", moment: Callable[[float], int]
    ) -> None:
        said = {f"kvrelay.{name}": value for name, value in part.attributes.items()}
        span = self._tracer.start_span(
            part.name,
            inside,
            attributes={"kvrelay.instance": part.process, **said},
            start_time=moment(part.start_s),
        )
        for event in part.events:
            span.add_event(event.name, dict(event.attributes), moment(event.at_s))
        if part.name == "handoff":
            for layer in trace.layers:
                span.add_event("layer sent", dict(layer.attributes), moment(layer.end_s))
        span.end(moment(part.end_s))


def _moments(received_unix_s: float) -> Callable[[float], int]:
    """From seconds since a request came to nanoseconds since 1970."""
    return lambda since_s: int((received_unix_s + since_s) * NANOSECONDS)


def _conventional(trace: Trace) -> dict[str, str | int | float | list[str]]:
    """Attributes by the GenAI conventions."""
    whole = trace.spans[0].attributes
    said: dict[str, str | int | float | list[str]] = {
        "gen_ai.operation.name": trace.origin.operation,
        "gen_ai.provider.name": "kvrelay",
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.model,
        "gen_ai.response.id": trace.request_id,
        "gen_ai.usage.input_tokens": whole["prompt_tokens"],
        "gen_ai.usage.output_tokens": whole["output_tokens"],
        "kvrelay.attempts": whole["attempts"],
    }
    if trace.outcome in FINISHED:
        said["gen_ai.response.finish_reasons"] = [trace.outcome]
    else:
        said["error.type"] = trace.outcome
    return said
