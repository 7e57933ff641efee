"""Sizes, help and defaults of the command line; one line for whatever is wrong with them."""

import re

import pytest
import typer
from typer.testing import CliRunner

from engine.config import EngineConfig
from services.cli.main import app, run
from services.cli.options import parse_size
from services.cli.serve import Counts
from services.runtime.errors import InvalidArgument
from services.runtime.settings import Role, RouterConfig, WorkerConfig, field_help


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("536870912", 2**29),
        ("512MiB", 2**29),
        ("512mib", 2**29),
        ("512Mi", 2**29),
        ("1G", 10**9),
        ("1GB", 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("2k", 2000),
        ("7B", 7),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1G", "1Q", "1,5G", "1e9", "0x10"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="no size"):
        parse_size(text)


def words_of_help(command: str) -> str:
    """The help of a command with the drawing taken away."""
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "400", "TERM": "dumb"})
    assert result.exit_code == 0
    return " ".join(re.sub(r"[│╭╰╮╯─]", " ", result.stdout).split())


ENGINE_OPTIONS = [
    "device",
    "dtype",
    "weights",
    "kernels",
    "deterministic",
    "threads",
    "kv_cache_bytes",
    "block_size",
    "max_context",
]


@pytest.mark.parametrize(
    ("command", "cls", "names"),
    [
        ("serve", EngineConfig, ENGINE_OPTIONS),
        (
            "serve",
            RouterConfig,
            ["host", "grpc_port", "http_port", "disaggregate_from", "placement"],
        ),
        ("worker", EngineConfig, ENGINE_OPTIONS),
        (
            "worker",
            WorkerConfig,
            ["role", "router", "transport", "transport_throttle", "metrics_port", "insecure"],
        ),
        ("router", RouterConfig, ["model", "internal_port", "max_requests", "drain_timeout_s"]),
    ],
)
def test_help_is_the_docstring_of_the_field(command: str, cls: type, names: list[str]) -> None:
    text = words_of_help(command)
    for name in names:
        assert field_help(cls, name) in text


def test_serve_has_the_options_it_promises() -> None:
    text = words_of_help("serve")
    promised = (
        "--prefill --decode --colocated --launcher --device --dtype --transport --threads "
        "--kv-cache-bytes --block-size --max-context --disaggregate-from --host --grpc-port "
        "--http-port --insecure"
    )
    assert set(promised.split()) <= set(text.split())


@pytest.mark.parametrize(
    ("counts", "roles"),
    [
        (Counts(), [Role.PREFILL, Role.DECODE]),
        (Counts(prefill=2, decode=1), [Role.PREFILL, Role.PREFILL, Role.DECODE]),
        (Counts(colocated=2), [Role.COLOCATED, Role.COLOCATED]),
        (Counts(prefill=1, colocated=1), [Role.PREFILL, Role.COLOCATED]),
        (Counts(decode=1), [Role.DECODE]),
    ],
)
def test_roles(counts: Counts, roles: list[Role]) -> None:
    assert list(counts.roles()) == roles


@pytest.mark.parametrize("counts", [Counts(prefill=1), Counts(decode=-1), Counts(colocated=-2)])
def test_clusters_that_could_not_answer(counts: Counts) -> None:
    with pytest.raises(InvalidArgument):
        counts.roles()


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["serve"], 2, "Missing argument 'MODEL'"),
        (["serve", "demo", "--no-such"], 2, "No such option"),
        (["serve", "demo", "--kv-cache-bytes", "much"], 2, "'much' is no size"),
        (["serve", "demo", "--threads", "two"], 2, "--threads"),
        (["serve", "demo", "--threads", "0"], 1, "--threads: 0 is less than 1"),
        (["serve", "demo", "--device", "abacus"], 1, "--device: 'abacus'"),
        (["serve", "demo", "--transport", "pigeon"], 1, "--transport: 'pigeon'"),
        (["serve", "demo", "--launcher", "catapult"], 1, "--launcher: 'catapult'"),
        (["serve", "demo", "--prefill", "1"], 1, "add --decode 1"),
        (["serve", "demo", "--grpc-port", "70000"], 1, "--grpc-port: 70000"),
        (["serve", "demo", "--host", "0.0.0.0"], 1, "--insecure"),
        (["worker", "--role", "decode"], 2, "--router"),
        (["worker", "--role", "queen", "--router", "127.0.0.1:1"], 2, "queen"),
        (["worker", "--role", "decode", "--router", "nowhere"], 1, "not HOST:PORT"),
        (["router", "--max-requests", "0"], 1, "--max-requests"),
        (["generate", "hello", "--seed", "-1"], 2, "--seed"),
        (["generate", "hello", "--address", "127.0.0.1:1"], 1, "nobody answers at 127.0.0.1:1"),
        (["status", "--address", "127.0.0.1:1"], 1, "nobody answers at 127.0.0.1:1"),
        ([], 2, "Missing command"),
        (["dance"], 2, "dance"),
    ],
)
def test_one_line_for_what_is_wrong(
    arguments: list[str], code: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("kvrelay: ")
    assert reason in err
