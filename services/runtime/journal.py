"""One-line logs on stderr: ``time LEVEL logger event key=value …``, or each line a JSON object.

Modules log through the standard library; this module only says how a line looks. An exception
becomes its type and the places it passed, on the same line and without its text, which may hold
parts of a prompt. Called once by whoever owns the process.
"""

import json
import logging
import os
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import PurePath

LEVEL_VARIABLE = "KVRELAY_LOG_LEVEL"
FORMAT_VARIABLE = "KVRELAY_LOG_FORMAT"
FORMATS = ("text", "json")
_FRAMES_SHOWN = 8


class OneLineFormatter(logging.Formatter):
    """Whatever is logged, one line."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = " ".join(record.getMessage().split())
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname} {record.name} {text}"
        if record.exc_info and record.exc_info[1] is not None:
            line += f" error={_where(record.exc_info[1])}"
        return line


class JsonFormatter(logging.Formatter):
    """Whatever is logged as one JSON object: time, level, logger, message, and its fields."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said: dict[str, object] = {
            "time": stamp,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": " ".join(record.getMessage().split()),
        }
        for argument in record.args if isinstance(record.args, tuple) else ():
            if isinstance(argument, Fields):
                # What a line is made of has its own keys already.
                said |= {k: v for k, v in argument.values_by_name.items() if k not in said}
        if record.exc_info and record.exc_info[1] is not None:
            said["error"] = _where(record.exc_info[1])
        return json.dumps(said, default=str)


def configure(level: str | None = None) -> None:
    """Send the logs of this process to stderr.

    Args:
        level: debug, info, warning or error; None: what ``KVRELAY_LOG_LEVEL`` says, else info.
            ``KVRELAY_LOG_FORMAT`` says json or text, which is what it is otherwise.
    """
    name = (level or os.environ.get(LEVEL_VARIABLE) or "info").upper()
    number = logging.getLevelNamesMapping().get(name, logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    is_json = os.environ.get(FORMAT_VARIABLE) == "json"
    handler.setFormatter(JsonFormatter() if is_json else OneLineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # libraries
    for ours in ("services", "engine", "kvtransfer"):
        logging.getLogger(ours).setLevel(number)


class Fields(str):
    """``key=value`` pairs as text, which remembers them."""

    values_by_name: dict[str, object]


def fields(**values: object) -> Fields:
    """``key=value`` pairs for a log line; values with spaces are quoted. As an argument of the
    line, they are fields of their own in JSON."""
    text = Fields(" ".join(f"{key}={_quoted(value)}" for key, value in values.items()))
    text.values_by_name = values
    return text


def _quoted(value: object) -> str:
    text = " ".join(str(value).split())
    return f'"{text}"' if " " in text or not text else text


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES_SHOWN:]
    places = [f"{PurePath(frame.filename).name}:{frame.lineno}" for frame in frames]
    return f"{type(error).__name__} at {'>'.join(places) or 'unknown'}"
