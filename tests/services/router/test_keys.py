"""API keys: files, whom a header stands for, and what each may do at once."""

import contextlib
from pathlib import Path

import pytest

from services.router.keys import Gate, Key, Keyring, digest_of, key_line, new_key, parse_keys
from services.runtime.errors import InvalidArgument, ResourceExhausted, Unauthenticated


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_what_is_printed_is_what_is_read() -> None:
    key = new_key()
    line = key_line("search", key, streams=8, per_minute=600)
    assert key not in line
    assert parse_keys(f"# ours\n\n{line}  # until March\n") == {
        digest_of(key): Key("search", 8, 600)
    }


@pytest.mark.parametrize(
    "text",
    [
        "name",
        "name abc",
        f"two words {'0' * 64}",
        f"name {'0' * 64} streams=-1",
        f"name {'0' * 64} size=3",
        f"name {'g' * 64}",
        f"a {'0' * 64}\nb {'0' * 64}",
    ],
)
def test_a_wrong_line_is_named(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--api-keys: line [12]: "):
        parse_keys(text)


def test_a_name_that_could_not_be_read_back() -> None:
    with pytest.raises(InvalidArgument):
        key_line("two words", new_key())


def test_whom_a_header_stands_for(tmp_path: Path) -> None:
    mine, file = new_key(), tmp_path / "keys"
    file.write_text(key_line("me", mine))
    keyring = Keyring(str(file))
    assert keyring.check(f"Bearer {mine}") == keyring.check(f"bearer  {mine} ") == Key("me")
    for wrong in ("", mine, f"Basic {mine}", "Bearer ", f"Bearer {mine}x", f"Bearer {new_key()}"):
        with pytest.raises(Unauthenticated) as refused:
            keyring.check(wrong)
        assert mine not in str(refused.value)


def test_a_changed_file_counts_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    first, second, file, clock = new_key(), new_key(), tmp_path / "keys", Clock()
    file.write_text(key_line("one", first))
    keyring = Keyring(str(file), clock)
    file.write_text(key_line("two", second))
    clock.now_s += 2
    assert keyring.check(f"Bearer {second}").name == "two"
    with pytest.raises(Unauthenticated):
        keyring.check(f"Bearer {first}")
    for broken in ("what is this", None):
        file.write_text(broken) if broken else file.unlink()
        clock.now_s += 2
        assert keyring.check(f"Bearer {second}").name == "two"


def test_no_file_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="--api-keys: cannot read"):
        Keyring(str(tmp_path / "none"))


def test_a_key_has_room_for_so_many_at_once() -> None:
    gate, key, other = Gate(), Key("a", streams=2), Key("b", streams=1)
    with contextlib.ExitStack() as held:
        for each in (key, key, other):
            held.enter_context(gate.enter(each))
        with pytest.raises(ResourceExhausted, match="2 requests of this key are running"):
            gate.enter(key).__enter__()
    with gate.enter(key):
        pass


def test_a_key_may_begin_so_many_a_minute() -> None:
    clock = Clock()
    gate, key = Gate(clock), Key("a", per_minute=2)
    for _ in range(2):
        with gate.enter(key):
            clock.now_s += 10
    with pytest.raises(ResourceExhausted, match="try again in 40 s") as refused:
        gate.enter(key).__enter__()
    assert refused.value.retry_after_s == 40
    clock.now_s += 40.1
    with gate.enter(key):
        pass
