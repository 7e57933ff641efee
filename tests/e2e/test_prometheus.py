"""A real Prometheus reads a real cluster under load, and every query of every dashboard answers."""

import contextlib
import json
import math
import shutil
import socket
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.deploy.observed import PROMETHEUS, program, queries, rules
from tests.e2e.harness import Cluster, eventually, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def _prometheus(cluster: Cluster, folder: Path) -> Iterator[str]:
    """The repository's own configuration, reading this cluster every half second; yields a URL."""
    binary = program("prometheus")
    shutil.copytree(PROMETHEUS, folder / "config")
    config = folder / "config" / "prometheus.yml"
    said = config.read_text("utf-8")
    assert said.count("127.0.0.1:8000") == 2 and said.count(": 5s") == 3
    config.write_text(
        said.replace("127.0.0.1:8000", cluster.http_address).replace(": 5s", ": 500ms"), "utf-8"
    )
    address = f"127.0.0.1:{_free_port()}"
    options = ["--storage.tsdb.path", str(folder / "data"), "--web.listen-address", address]
    process = subprocess.Popen(
        [binary, "--config.file", str(config), *options, "--log.level=warn"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=10)
        assert process.stderr is not None
        process.stderr.close()


@contextlib.contextmanager
def _load(cluster: Cluster) -> Iterator[None]:
    """Requests, one after the other, until the block ends."""
    over = threading.Event()

    def ask() -> None:
        number = 0
        while not over.is_set():
            number += 1
            cluster.generate(prompt=f"{number} the same end of all prompts " * 3, max_tokens=8)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        over.set()
        asking.join()


def _problem(url: str, query: str) -> str | None:
    """What is wrong with a query; None: it returned at least one number."""
    concrete = query.replace("$__rate_interval", "5s").replace("$instance", ".+")
    asked = urllib.parse.urlencode({"query": concrete})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{asked}", timeout=10) as answer:
            result = json.load(answer)["data"]["result"]
    except OSError as error:
        return str(error)
    numbers = [float(each["value"][1]) for each in result]
    return None if any(map(math.isfinite, numbers)) else "no data"


def test_every_query_of_every_dashboard_returns_data(tiny_model: Path, tmp_path: Path) -> None:
    options = ("--disaggregate-from", "0", "--dtype", "float32", "--kv-cache-bytes", "64MiB")
    with serve(str(tiny_model), *options) as cluster:
        with _prometheus(cluster, tmp_path) as url, _load(cluster):
            _ask_everything(url)
        _check_that_parts_add_up(cluster)


def _ask_everything(url: str) -> None:
    open_queries = set(queries()) | {(r["record"], r["record"]) for r in rules("recording.yml")}
    problems: dict[tuple[str, str], str] = {}

    def all_answered() -> bool:
        problems.clear()
        for each in sorted(open_queries):
            problem = _problem(url, each[1])
            if problem is None:
                open_queries.discard(each)
            else:
                problems[each] = problem
        return not open_queries

    with contextlib.suppress(AssertionError):
        eventually(all_answered, 60, "every query answered")
    assert not problems
    # What this test would see of a query that is broken.
    assert _problem(url, "sum(kvrelay_no_such_metric)") == "no data"
    assert "400" in str(_problem(url, "sum(kvrelay_requests_total"))
    # Nothing is counted twice, and nothing is on fire.
    assert _problem(url, 'up{job="kvrelay-instances"} == 1') is None
    assert _problem(url, 'ALERTS{alertstate="firing"}') == "no data"


def _samples(address: str) -> list[Sample]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return [s for family in text_string_to_metric_families(text) for s in family.samples]


def _check_that_parts_add_up(cluster: Cluster) -> None:
    """The tokens that instances say they worked for are those that clients were told of."""
    router = _samples(cluster.http_address)
    workers = {i["role"]: _samples(i["metrics_address"]) for i in cluster.status()}
    assert all(s.value >= 0 for each in (router, *workers.values()) for s in each)

    def total(samples: list[Sample], name: str, **labels: str) -> float:
        return sum(
            s.value for s in samples if s.name == name and labels.items() <= s.labels.items()
        )

    prompt = total(router, "kvrelay_request_prompt_tokens_sum")
    assert prompt > 0
    for role in ("prefill", "decode"):
        assert total(workers[role], "kvrelay_prompt_tokens_total") == prompt
        assert total(workers[role], "vllm:prompt_tokens_total") == prompt
    decode, by_source = workers["decode"], "kvrelay_prompt_tokens_total"
    assert total(decode, by_source, source="handoff") > 0
    assert total(decode, by_source, source="local_compute") == 0
    computed = total(workers["prefill"], by_source, source="local_compute")
    assert total(workers["prefill"], "kvrelay_computed_tokens_total", phase="prefill") == computed
    output = total(router, "kvrelay_request_output_tokens_sum")
    assert total(decode, "kvrelay_output_tokens_total") == output
    parts = ("request_queue_time", "prefill_time")
    known_s = sum(total(router, f"kvrelay_{part}_seconds_sum") for part in parts)
    assert 0 < known_s <= total(router, "kvrelay_time_to_first_token_seconds_sum")
