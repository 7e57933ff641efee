"""Real clusters for tests: ``kvrelay serve`` as a process, its instances, its clients."""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil

from protos import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from protos import inference_pb2 as public

READY = re.compile(r"^ready grpc=(\S+) http=(\S+)$")
START_TIMEOUT_S = 50.0


def eventually(check: Callable[[], Any], within_s: float, what: str) -> Any:
    """The first true answer of ``check``; fails after ``within_s``."""
    deadline_s = time.monotonic() + within_s
    while True:
        if answer := check():
            return answer
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {what}"
        time.sleep(0.02)


def title_of(process: psutil.Process) -> list[str]:
    """The words by which a list of processes shows it."""
    return " ".join(process.cmdline()).split()


def all_gone(family: list[psutil.Process]) -> bool:
    """None of them runs any more; what has lost its parent is reaped a moment later."""
    return not psutil.wait_procs(family, timeout=2)[1]


@dataclass
class Cluster:
    """One running ``kvrelay serve``."""

    process: subprocess.Popen[str]
    grpc_address: str
    http_address: str
    errors: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.http_address}"

    def status(self) -> list[dict[str, Any]]:
        """The instances, as ``kvrelay status --json`` lists them."""
        with grpc.insecure_channel(self.grpc_address) as channel:
            stub = cluster_pb2_grpc.StatusStub(channel)
            answer = stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=5)
        return [
            {
                "instance_id": i.instance_id,
                "role": cluster_pb2.Role.Name(i.role).removeprefix("ROLE_").lower(),
                "address": i.address,
                "state": i.state,
                "metrics_address": i.metrics_address,
                **{f.name: getattr(i.load, f.name) for f in i.load.DESCRIPTOR.fields},
            }
            for i in answer.instances
        ]

    def instances(self, role: str) -> list[dict[str, Any]]:
        return [i for i in self.status() if i["role"] == role]

    def pid_of(self, role: str) -> int:
        """The process id of the one worker with this role."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                title = title_of(child)
                if "worker" in title and role in title:
                    return child.pid
        raise AssertionError(f"no {role} worker process")

    def held_nothing(self) -> bool:
        """No block, request or handoff of anybody is left, and the accounts add up."""
        for i in self.status():
            accounted = sum(
                i[f"blocks_{state}"] for state in ("free", "cached", "held", "quarantined")
            )
            assert accounted == i["blocks_total"], i
            busy = ("blocks_held", "blocks_quarantined", "requests_running")
            if any(i[key] for key in (*busy, "requests_waiting", "handoffs_active")):
                return False
        return True

    def all_ready(self, count: int) -> bool:
        ready = [i for i in self.status() if i["state"] == "ready"]
        return len(ready) == count

    @contextlib.contextmanager
    def client(self) -> Iterator[inference_pb2_grpc.InferenceStub]:
        with grpc.insecure_channel(self.grpc_address) as channel:
            yield inference_pb2_grpc.InferenceStub(channel)

    def generate(self, **fields: Any) -> "Generated":
        """One whole answer over gRPC; raises grpc.RpcError."""
        with self.client() as stub:
            return collect(stub.Generate(request(**fields), timeout=50))


@dataclass
class Generated:
    """What a Generate stream said."""

    accepted: public.Accepted | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: public.Finished | None = None
    num_terminal: int = 0
    answers: dict[int, list[int]] = field(default_factory=dict)
    """Token ids of each answer, by its index."""
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens of the first answer, when asked for."""


def request(
    prompt: str | None = None,
    ids: list[int] | None = None,
    chat: list[tuple[str, str]] | None = None,
    **sampling: Any,
) -> public.GenerateRequest:
    """A greedy request unless ``temperature`` says otherwise."""
    message = public.GenerateRequest(
        sampling=public.SamplingParams(**{"temperature": 0.0, **sampling})
    )
    if prompt is not None:
        message.prompt = prompt
    if ids is not None:
        message.prompt_token_ids.ids.extend(ids)
    for role, content in chat or []:
        message.chat.messages.add(role=role, content=content)
    return message


def collect(stream: Any) -> Generated:
    """Reads a stream to its end."""
    answer = Generated()
    for response in stream:
        assert not answer.num_terminal, "an event after the terminal one"
        match response.WhichOneof("event"):
            case "accepted":
                answer.accepted = response.accepted
            case "tokens":
                answer.token_ids.extend(response.tokens.token_ids)
                answer.text += response.tokens.text
                said = answer.answers.setdefault(response.tokens.index, [])
                said.extend(response.tokens.token_ids)
                if not response.tokens.index:
                    answer.logprobs += [each.token.logprob for each in response.tokens.logprobs]
            case "finished":
                answer.finished = response.finished
                answer.num_terminal += 1
    return answer


@contextlib.contextmanager
def serve(model: str, *options: str, expect_exit: int | None = 0) -> Iterator[Cluster]:
    """``kvrelay serve model ...`` until the block ends; then stopped by SIGTERM and checked.

    ``expect_exit`` None: the block itself ends the cluster.
    """
    command = [sys.executable, "-m", "services.cli.main", "serve", model]
    command += ["--grpc-port", "0", "--http-port", "0", "--threads", "1", *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines: queue.Queue[str] = queue.Queue()
    errors: list[str] = []
    for stream, sink in ((process.stdout, lines.put), (process.stderr, errors.append)):
        threading.Thread(target=_drain, args=(stream, sink), daemon=True).start()
    family: list[psutil.Process] = []
    try:
        first = _first_line(process, lines, errors)
        match = READY.match(first)
        assert match, f"not a ready line: {first!r}"
        cluster = Cluster(process, match[1], match[2], errors)
        yield cluster
        family = psutil.Process(process.pid).children(recursive=True) if expect_exit == 0 else []
        if expect_exit is not None:
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=20)
            assert code == expect_exit, f"exit {code}: {''.join(errors)[-2000:]}"
            assert lines.empty(), "more than one line on stdout"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        _, alive = psutil.wait_procs(family, timeout=3)
        assert not alive, f"left running: {alive}"


def _drain(stream: Any, sink: Callable[[str], None]) -> None:
    for line in stream:
        sink(line.rstrip("\n"))
    stream.close()


def _first_line(
    process: subprocess.Popen[str], lines: "queue.Queue[str]", errors: list[str]
) -> str:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(queue.Empty):
            return lines.get(timeout=0.1)
        if process.poll() is not None:
            break
    tail = "\n".join(errors[-20:])
    raise AssertionError(f"no ready line (exit {process.poll()}):\n{tail}")
