"""Compiling once, finding it again, and saying in one line why there is nothing to find.

The compiler here is a script that copies a few bytes: what is compiled is tested elsewhere.
"""

import stat
import threading
from pathlib import Path

import pytest

from engine.ops.cpu import build
from engine.ops.cpu.instruction_sets import AVX2, PORTABLE

FAKE = """#!/bin/sh
if [ "$1" = --version ]; then echo fake 1; exit 0; fi
echo run >> {log}
sleep 0.2
for last; do :; done
echo library > "$last"
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own and a compiler that writes one line a run here."""
    log = tmp_path / "log"
    install(monkeypatch, tmp_path, FAKE.format(log=log))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return log


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    compiler = folder / "compiler"
    compiler.write_text(script)
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))


def test_compiles_once(log: Path, tmp_path: Path) -> None:
    first = build.library(PORTABLE)

    assert build.library(PORTABLE) == first
    assert first.read_text() == "library\n"
    assert first.parent == tmp_path / "cache" / "kvrelay"
    assert log.read_text().count("run") == 1


def test_other_flags_sources_or_compiler_are_other_libraries(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [build.library(PORTABLE), build.library(AVX2)]
    install(monkeypatch, tmp_path, FAKE.format(log=log).replace("fake 1", "fake 2"))
    paths.append(build.library(PORTABLE))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text("int one;")
    monkeypatch.setattr(build, "SOURCES", sources)
    paths.append(build.library(PORTABLE))

    assert len(set(paths)) == 4
    assert log.read_text().count("run") == 4


def test_several_at_once_compile_once(log: Path) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(build.library(PORTABLE))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 4 and len(set(found)) == 1
    assert log.read_text().count("run") == 1


def test_nothing_is_left_of_a_compiler_that_fails(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.cpp:3: error: no" >&2\nexit 1\n'
    install(monkeypatch, tmp_path, script)

    with pytest.raises(build.NativeUnavailable, match=r"failed: x\.cpp:3: error: no"):
        build.library(PORTABLE)
    assert not list((tmp_path / "cache").rglob("*.so*"))


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(build.NativeUnavailable, match=r"no C\+\+ compiler found; install"):
        build.library(PORTABLE)


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")

    with pytest.raises(build.NativeUnavailable, match="CXX=no-such-compiler is not a command"):
        build.library(PORTABLE)


def test_a_cache_that_cannot_be_made(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")

    with pytest.raises(build.NativeUnavailable, match="set XDG_CACHE_HOME"):
        build.library(PORTABLE)
