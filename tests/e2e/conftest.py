"""One shared cluster per kind for the tests that leave it as they found it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Cluster, eventually, serve
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def cluster(tiny_model: Path) -> Iterator[Cluster]:
    """1 prefill + 1 decode, every prompt handed off; nothing may be held after each module."""
    options = ("--disaggregate-from", "0", "--dtype", "float32", "--kv-cache-bytes", "64MiB")
    with serve(str(tiny_model), *options) as running:
        yield running
        eventually(running.held_nothing, 3, "everything free after the tests")
