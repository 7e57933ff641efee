"""The committed stubs are what the .proto files say: `make protos` would change nothing."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_stubs_are_fresh(tmp_path: Path) -> None:
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").glob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *sources]
    subprocess.run(command, cwd=ROOT, check=True)

    fresh = {path.name: path.read_text() for path in (tmp_path / "protos").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "protos").glob("*_pb2*")}
    stale = sorted(
        name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name)
    )
    assert not stale, f"run `make protos`: {stale}"
