"""``kvrelay demo``, which ``make demo`` runs: one answer, its timeline, and nothing left."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from services.cli.demo import PROMPT
from tests.e2e.harness import START_TIMEOUT_S, all_gone, title_of

pytestmark = pytest.mark.slow


@pytest.fixture
def demo() -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-u", "-m", "services.cli.main", "demo"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def family_in_mid_answer(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Read until the answer has begun; the cluster's processes."""
    assert process.stdout is not None
    while process.stdout.readline().strip():  # the prompt, then an empty line
        pass
    assert process.stdout.read(20)
    family: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 4, "router, what the workers are forked from, two workers"
    return family


def test_one_answer_went_through_a_handoff(demo: "subprocess.Popen[str]") -> None:
    out, err = demo.communicate(timeout=START_TIMEOUT_S)
    assert (demo.returncode, err) == (0, "")
    prompt, answer, rest = out.split("\n\n", 2)
    assert " ".join(prompt.split()) == PROMPT
    assert len(answer.split()) > 20
    assert "relay" in out.removeprefix(prompt)
    assert "prefill-" in rest and " → decode-" in rest
    assert "% hidden" in rest and "per token" in rest


def test_ctrl_c_stops_it_cleanly(demo: "subprocess.Popen[str]") -> None:
    family = family_in_mid_answer(demo)
    demo.send_signal(signal.SIGINT)
    _, err = demo.communicate(timeout=15)
    assert (demo.returncode, err) == (0, "")
    assert all_gone(family)


@pytest.mark.parametrize("service", ["router", "prefill", "decode"])
def test_a_killed_part_leaves_nothing(demo: "subprocess.Popen[str]", service: str) -> None:
    family = family_in_mid_answer(demo)
    next(child for child in family if service in title_of(child)).kill()
    _, err = demo.communicate(timeout=30)
    lost = service == "router"  # what dies with any other part goes on elsewhere
    assert demo.returncode == int(lost)
    assert err.splitlines()[-1].startswith("kvrelay: ") or not lost
    assert "Traceback" not in err
    assert all_gone(family)
