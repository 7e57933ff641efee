"""OpenTelemetry: spans in memory, and over OTLP to a receiver in this process."""

import http.server
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.router.telemetry import ENDPOINTS, Telemetry, is_asked_for
from services.router.trace import Origin
from services.router.traces import Traces
from tests.services.router.test_trace import handed_off

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ORIGIN = Origin("chat", f"00-{TRACE_ID}-{PARENT_ID}-01", "vendor=x")


def tell(telemetry: Telemetry, origin: Origin = ORIGIN, outcome: str = "stop") -> None:
    traces = Traces("m", 0, telemetry.tell, wall_clock=lambda: 1001.0)
    traces.end("r1", 100, handed_off(), origin, outcome, 1.0)


@pytest.fixture
def memory() -> Iterator[tuple[Telemetry, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(provider)
    yield telemetry, exporter
    telemetry.close()


def test_spans_are_children_of_the_clients_with_genai_attributes(
    memory: tuple[Telemetry, InMemorySpanExporter],
) -> None:
    telemetry, exporter = memory
    tell(telemetry)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"chat m", "queue", "prefill", "handoff", "decode"}
    root = spans.pop("chat m")
    assert root.parent is not None and f"{root.parent.span_id:016x}" == PARENT_ID
    assert root.context.trace_state.get("vendor") == "x"
    assert (root.start_time, root.end_time) == (1000 * 10**9, 1001 * 10**9)
    assert root.attributes is not None
    assert root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["gen_ai.usage.input_tokens"] == 100
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    for span in spans.values():
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert span.parent is not None and span.parent.span_id == root.context.span_id
    assert [e.name for e in spans["prefill"].events] == ["chunk", "chunk"]
    assert [e.name for e in spans["handoff"].events] == ["layer sent"] * 4
    assert [e.name for e in spans["decode"].events] == ["tokens"] * 3


def test_an_error_is_one_and_a_broken_context_begins_a_trace(
    memory: tuple[Telemetry, InMemorySpanExporter],
) -> None:
    telemetry, exporter = memory
    tell(telemetry, Origin("chat", "no context"), "unavailable")
    root = next(s for s in exporter.get_finished_spans() if s.name == "chat m")
    assert root.parent is None
    assert root.attributes is not None and root.attributes["error.type"] == "unavailable"
    assert "gen_ai.response.finish_reasons" not in root.attributes
    assert not root.status.is_ok


def test_it_is_off_unless_the_environment_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert Telemetry.open() is None
    asked = {ENDPOINTS[0]: "http://127.0.0.1:1"}
    assert is_asked_for(asked)
    assert not is_asked_for({**asked, "OTEL_SDK_DISABLED": "true"})
    assert not is_asked_for({**asked, "OTEL_TRACES_EXPORTER": "none"})


class _Receiver(http.server.BaseHTTPRequestHandler):
    received: list[tuple[str, ExportTraceServiceRequest]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.received.append((self.path, ExportTraceServiceRequest.FromString(body)))
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def test_a_receiver_gets_the_spans_by_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    _Receiver.received = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        monkeypatch.setenv(ENDPOINTS[0], f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        telemetry = Telemetry.open()
        assert telemetry is not None
        tell(telemetry)
        telemetry.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    [(path, request)] = _Receiver.received
    assert path == "/v1/traces"
    [resource] = request.resource_spans
    named = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert named["service.name"] == "kvrelay"
    spans = resource.scope_spans[0].spans
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    assert sorted(span.name for span in spans) == [
        "chat m", "decode", "handoff", "prefill", "queue"
    ]  # fmt: skip
