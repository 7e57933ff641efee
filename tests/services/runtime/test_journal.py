"""Logs are one line each and never hold the text of an exception."""

import logging
import sys

from services.runtime.journal import OneLineFormatter, fields


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
