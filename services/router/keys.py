"""API keys: who may ask, and how much at once.

A file names the keys, one a line, by their SHA-256: whoever reads it cannot ask. Keys are drawn
with 256 bits, so a slow hash would protect nothing more.

    # name   sha256 of the key   limits, if any
    search   9f86d08...          streams=8 per_minute=600

The file is read again when it changes. Knows no protocol; both public faces ask ``Keyring`` for
whom a key is, and ``Gate`` for room.
"""

import contextlib
import hashlib
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from services.runtime.errors import InvalidArgument, ResourceExhausted, Unauthenticated

PREFIX = "kvr_"
_LOOK_S = 1.0
_WINDOW_S = 60.0
_LINE = re.compile(r"(?P<name>[\w.@-]{1,64})\s+(?P<digest>[0-9a-f]{64})(?P<limits>(\s+\w+=\d+)*)")


@dataclass(frozen=True, slots=True)
class Key:
    """Whom a key stands for."""

    name: str
    streams: int = 0
    """Most requests at once; 0: no limit of its own."""
    per_minute: int = 0
    """Most requests begun in a minute; 0: no limit."""


def new_key() -> str:
    """A key nobody can guess."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """What stands in the file."""
    return hashlib.sha256(key.encode()).hexdigest()


def key_line(name: str, key: str, streams: int = 0, per_minute: int = 0) -> str:
    """What goes into the file.

    Raises:
        InvalidArgument: such a name could not be read back.
    """
    limits = {"streams": streams, "per_minute": per_minute}
    said = "".join(f" {each}={limit}" for each, limit in limits.items() if limit)
    line = f"{name} {digest_of(key)}{said}"
    if _LINE.fullmatch(line) is None:
        raise InvalidArgument("NAME", f"{name!r}: letters, digits, . _ @ - only, at most 64")
    return line


def parse_keys(text: str) -> dict[str, Key]:
    """Digest -> key.

    Raises:
        InvalidArgument: a line is none of a key file; names it.
    """
    keys: dict[str, Key] = {}
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.partition("#")[0].strip()
        if not stripped:
            continue
        match = _LINE.fullmatch(stripped)
        limits = dict(each.split("=") for each in match["limits"].split()) if match else {}
        if match is None or not limits.keys() <= {"streams", "per_minute"}:
            raise InvalidArgument(
                "--api-keys", f"line {number}: not NAME SHA256 [streams=N] [per_minute=N]"
            )
        if match["digest"] in keys:
            raise InvalidArgument("--api-keys", f"line {number}: this key is there already")
        keys[match["digest"]] = Key(match["name"], **{k: int(v) for k, v in limits.items()})
    return keys


class Keyring:
    """The keys in a file.

    Raises:
        InvalidArgument: there is no such file, or it is no key file.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path)
        self._clock = clock
        self._looked_s = clock()
        try:
            self._seen = self._path.stat().st_mtime_ns
            self._keys = parse_keys(self._path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument("--api-keys", f"cannot read {path}: {error}") from error

    def check(self, authorization: str) -> Key:
        """Whom the header ``Authorization: Bearer KEY`` stands for.

        Raises:
            Unauthenticated: nobody.
        """
        self._refresh()
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise Unauthenticated("no API key: send Authorization: Bearer KEY")
        # Looked up by digest: how long it takes says nothing about any key.
        key = self._keys.get(digest_of(given.strip()))
        if key is None:
            raise Unauthenticated("the API key is not known here")
        return key

    def _refresh(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        # A file that is being written, or is wrong, does not lock everybody out.
        with contextlib.suppress(OSError, UnicodeDecodeError, InvalidArgument):
            if (seen := self._path.stat().st_mtime_ns) != self._seen:
                self._keys = parse_keys(self._path.read_text("utf-8"))
                self._seen = seen


class Gate:
    """What each key has begun and not ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._begun: dict[str, deque[float]] = {}

    @contextlib.contextmanager
    def enter(self, key: Key) -> Iterator[None]:
        """Hold room for one request.

        Raises:
            ResourceExhausted: the key has none left.
        """
        now_s = self._clock()
        if key.streams and self._running[key.name] >= key.streams:
            raise ResourceExhausted(
                f"{key.streams} requests of this key are running, its limit: try again in 1 s"
            )
        if key.per_minute:
            begun = self._begun.setdefault(key.name, deque())
            while begun and begun[0] <= now_s - _WINDOW_S:
                begun.popleft()
            if len(begun) >= key.per_minute:
                wait_s = begun[0] + _WINDOW_S - now_s
                raise ResourceExhausted(
                    f"{key.per_minute} requests a minute is this key's limit: "
                    f"try again in {max(1.0, wait_s):.0f} s",
                    max(1.0, wait_s),
                )
            begun.append(now_s)
        self._running[key.name] += 1
        try:
            yield
        finally:
            self._running[key.name] -= 1
            if not self._running[key.name]:
                del self._running[key.name]
