"""``generate`` and ``status`` against a router that is only a script."""

import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from protos import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from protos import inference_pb2 as public
from services.cli.main import run


class ScriptedRouter(inference_pb2_grpc.InferenceServicer, cluster_pb2_grpc.StatusServicer):
    """Answers everything with ``Hello, wörld``; remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[public.GenerateRequest] = []
        self.ended = threading.Event()

    def Generate(self, request: Any, context: Any) -> Iterator[public.GenerateResponse]:
        self.requests.append(request)
        context.add_callback(self.ended.set)
        if request.prompt == "refuse":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "prompt: is\nrefused")
        accepted = public.Accepted(prompt_tokens=3, seed=9)
        yield public.GenerateResponse(request_id="r-1", accepted=accepted)
        for token_id, text in ((5, "Hello, "), (6, "wörld")):
            tokens = public.Tokens(token_ids=[token_id], text=text)
            yield public.GenerateResponse(request_id="r-1", tokens=tokens)
        if request.prompt == "hang":
            self.ended.wait(30)
            return
        finished = public.Finished(
            finish_reason=public.FINISH_REASON_STOP,
            stop_reason="!",
            usage=public.Usage(prompt_tokens=3, output_tokens=2, cached_tokens=1),
            timeline=public.Timeline(
                queue_s=0.001,
                prefill_s=0.3,
                handoff_s=0.2,
                handoff_hidden_ratio=0.5,
                prefill_instance="prefill-a",
                decode_instance="decode-b",
                tpot_s=0.02,
            ),
        )
        yield public.GenerateResponse(request_id="r-1", finished=finished)

    def GetStatus(self, request: Any, context: Any) -> cluster_pb2.GetStatusResponse:
        load = cluster_pb2.InstanceLoad(blocks_total=10, blocks_free=7, blocks_held=3)
        instance = cluster_pb2.InstanceStatus(
            instance_id="decode-b",
            role=cluster_pb2.ROLE_DECODE,
            address="127.0.0.1:9",
            state="ready",
            load=load,
        )
        return cluster_pb2.GetStatusResponse(model="tiny", instances=[instance])


@pytest.fixture
def router() -> Iterator[tuple[ScriptedRouter, str]]:
    scripted = ScriptedRouter()
    server = grpc.server(ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServicer_to_server(scripted, server)
    cluster_pb2_grpc.add_StatusServicer_to_server(scripted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield scripted, f"127.0.0.1:{port}"
    server.stop(None).wait()


Router = tuple[ScriptedRouter, str]


def test_text_goes_to_stdout_alone(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    scripted, address = router
    assert run(["generate", "Say", "--address", address, "--max-tokens", "7"]) == 0
    assert capsys.readouterr() == ("Hello, wörld\n", "")
    (request,) = scripted.requests
    assert request.prompt == "Say"
    assert request.sampling.max_tokens == 7
    assert request.sampling.temperature == 0.0
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("seed")


def test_all_options_arrive(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted, address = router
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    monkeypatch.setenv("KVRELAY_ADDRESS", address)
    options = ["--chat", "--temperature", "0.5", "--stop", "a", "--stop", "b"]
    options += ["--seed", "18446744073709551615"]
    assert run(["generate", "-", *options]) == 0
    (request,) = scripted.requests
    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "from stdin")]
    assert request.sampling.temperature == 0.5
    assert request.sampling.seed == 2**64 - 1
    assert list(request.sampling.stop) == ["a", "b"]


def test_json(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "Say", "--address", router[1], "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    answer = json.loads(out)
    timeline = answer.pop("timeline")
    assert answer == {
        "request_id": "r-1",
        "text": "Hello, wörld",
        "token_ids": [5, 6],
        "finish_reason": "stop",
        "stop_reason": "!",
        "usage": {"prompt_tokens": 3, "output_tokens": 2, "cached_tokens": 1},
    }
    assert timeline["handoff_hidden_ratio"] == 0.5
    assert timeline["decode_instance"] == "decode-b"


def test_timeline_goes_to_stderr(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "Say", "--address", router[1], "--timeline"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello, wörld\n"
    assert "50% hidden" in err


def test_a_refusal_is_one_line(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "refuse", "--address", router[1]]) == 1
    assert capsys.readouterr() == ("", "kvrelay: prompt: is refused\n")


def test_ctrl_c_cancels_the_request(router: Router) -> None:
    scripted, address = router
    command = [sys.executable, "-m", "services.cli.main", "generate", "hang"]
    with subprocess.Popen(
        [*command, "--address", address], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(len("Hello, ")) == b"Hello, "
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stderr.read() == b""
    assert scripted.ended.wait(5)


def test_status(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--address", router[1], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "model": "tiny",
        "instances": [
            {
                "instance_id": "decode-b",
                "role": "decode",
                "address": "127.0.0.1:9",
                "state": "ready",
                "blocks_total": 10,
                "blocks_free": 7,
                "blocks_cached": 0,
                "blocks_held": 3,
                "blocks_quarantined": 0,
                "requests_running": 0,
                "requests_waiting": 0,
                "handoffs_active": 0,
            }
        ],
    }


def test_status_table(
    router: Router, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["status", "--address", router[1]]) == 0
    title, header, row = capsys.readouterr().out.strip().splitlines()
    assert "tiny" in title
    assert header.split()[:3] == ["role", "instance", "address"]
    assert row.split()[:4] == ["decode", "decode-b", "127.0.0.1:9", "ready"]
    assert [int(figure) for figure in row.split()[4:]] == [7, 0, 3, 0, 10, 0, 0, 0]
