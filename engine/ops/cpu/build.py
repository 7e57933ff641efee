"""Compile the native kernels at first use, and find them again.

A library is named by a hash over sources, compiler and flags, so a shared home directory, an
upgrade of any of them and several processes at once are all safe. Knows nothing of what the
kernels compute. Called by ``native_model``; ``python -m engine.ops.cpu.build`` does it ahead of
time.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import EngineError
from engine.ops.cpu.instruction_sets import InstructionSet, of_this_machine

SOURCES = Path(__file__).parent / "native"
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-shared",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    # a * b + c is one instruction wherever there is one.
    "-ffp-contract=fast",
    # Rows of 16-bit elements are multiplied as 32-bit lanes.
    "-fno-strict-aliasing",
    "-fno-math-errno",
)
_COMPILERS = ("g++", "clang++", "c++")
_COMPILE_TIMEOUT_S = 300.0


class NativeUnavailable(EngineError):
    """There is no native library for this machine and none can be built: torch must serve."""


def library(instruction_set: InstructionSet | None = None) -> Path:
    """Path of the compiled kernels, built now if need be (some ten seconds).

    Args:
        instruction_set: None: the widest this machine runs.

    Raises:
        NativeUnavailable: no compiler, or it fails.
    """
    chosen = instruction_set or of_this_machine()
    compiler = _compiler()
    command = [*compiler, *_FLAGS, *chosen.flags]
    path = _cache_folder() / f"cpu-{chosen.name}-{_digest(compiler, command)}.so"
    if not path.exists():
        with _locked(path.with_suffix(".lock")):
            # Another process may have built it while this one waited.
            if not path.exists():
                _compile(command, path)
    return path


def _compiler() -> list[str]:
    """The command of ``$CXX``, or of the first compiler in the path."""
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked:
        if shutil.which(asked[0]) is None:
            raise NativeUnavailable(f"native kernels: CXX={asked[0]} is not a command; unset it")
        return asked
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise NativeUnavailable(
        "native kernels: no C++ compiler found; install g++ or clang++, or name one in CXX"
    )


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def _digest(compiler: list[str], command: list[str]) -> str:
    digest = hashlib.sha256()
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False)
    parts = [version.stdout, *(word.encode() for word in command)]
    parts += [file.read_bytes() for file in sorted([*_sources(), *SOURCES.glob("*.h")])]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "kvrelay"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NativeUnavailable(
            f"native kernels: cannot make {folder}: {error.strerror}; set XDG_CACHE_HOME"
        ) from error
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One builder at a time; the system drops the lock of a process that dies."""
    try:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise NativeUnavailable(
            f"native kernels: cannot write {path}: {error.strerror}; set XDG_CACHE_HOME"
        ) from error


def _compile(command: list[str], path: Path) -> None:
    """Compile to a name of our own, then move it into place in one go."""
    partial = path.with_suffix(f".{os.getpid()}")
    sources = [str(file) for file in _sources()]
    try:
        subprocess.run(
            [*command, *sources, "-o", str(partial)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT_S,
        )
        partial.replace(path)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        reason = lines[0] if lines else f"exit status {error.returncode}"
        raise NativeUnavailable(f"native kernels: {command[0]} failed: {reason}") from error
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(
            f"native kernels: {command[0]} ran past {_COMPILE_TIMEOUT_S:.0f} s; set CXX to another"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        print(library())
    except NativeUnavailable as unavailable:
        sys.exit(str(unavailable))
