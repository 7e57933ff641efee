"""Logs are one line each and never hold the text of an exception."""

import json
import logging
import sys

import pytest

from services.runtime.journal import (
    FORMAT_VARIABLE,
    JsonFormatter,
    OneLineFormatter,
    configure,
    fields,
)


def _record(message: str, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("services.x", logging.ERROR, __file__, 1, message, (), info)


def test_a_record_is_one_line() -> None:
    line = OneLineFormatter().format(_record("two\nlines"))
    assert line.endswith("ERROR services.x two lines")


def test_an_exception_tells_where_but_not_what() -> None:
    try:
        raise ValueError("a secret\nprompt")
    except ValueError as error:
        line = OneLineFormatter().format(_record("failed", error))
    assert "\n" not in line
    assert "secret" not in line
    assert "error=ValueError at test_journal.py:" in line
    assert sys.exc_info() == (None, None, None)


def test_fields() -> None:
    assert fields(role="decode", reason="went away", none="") == (
        'role=decode reason="went away" none=""'
    )


def test_json_lines_have_fields_of_their_own_and_no_text_of_an_exception() -> None:
    said = fields(request="r1", e2e_s=0.5, level="theirs")
    record = logging.LogRecord("services.x", logging.INFO, __file__, 1, "request %s", (said,), None)
    line = JsonFormatter().format(record)
    told = json.loads(line)
    assert "\n" not in line
    assert (told["request"], told["e2e_s"], told["level"]) == ("r1", 0.5, "info")
    assert told["message"] == "request request=r1 e2e_s=0.5 level=theirs"
    assert told["time"].endswith("+00:00") and told["logger"] == "services.x"
    try:
        raise ValueError("a secret\nprompt")
    except ValueError as error:
        line = JsonFormatter().format(_record("failed\nso", error))
    assert "secret" not in line and json.loads(line)["error"].startswith("ValueError at ")


def test_the_environment_says_how_lines_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        for form, is_json in (("json", True), ("text", False)):
            monkeypatch.setenv(FORMAT_VARIABLE, form)
            configure("info")
            logging.getLogger("services.test").info("up %s", fields(role="decode"))
            line = capsys.readouterr().err
            assert line.startswith("{") == is_json
            assert ("role=decode" in line) and line.count("\n") == 1
    finally:
        root.handlers[:], root.level = handlers, level
        logging.getLogger("services").setLevel(logging.NOTSET)
