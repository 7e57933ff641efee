"""One-line logs on stderr: ``time LEVEL logger event key=value …``.

Modules log through the standard library; this module only says how a line looks. An exception
becomes its type and the places it passed, on the same line and without its text, which may hold
parts of a prompt. Called once by whoever owns the process.
"""

import logging
import os
import sys
import time
import traceback
from pathlib import PurePath

LEVEL_VARIABLE = "KVRELAY_LOG_LEVEL"
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


def configure(level: str | None = None) -> None:
    """Send the logs of this process to stderr.

    Args:
        level: debug, info, warning or error; None: what ``KVRELAY_LOG_LEVEL`` says, else info.
    """
    name = (level or os.environ.get(LEVEL_VARIABLE) or "info").upper()
    number = logging.getLevelNamesMapping().get(name, logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # libraries
    for ours in ("services", "engine", "kvtransfer"):
        logging.getLogger(ours).setLevel(number)


def fields(**values: object) -> str:
    """``key=value`` pairs for a log line; values with spaces are quoted."""
    return " ".join(f"{key}={_quoted(value)}" for key, value in values.items())


def _quoted(value: object) -> str:
    text = " ".join(str(value).split())
    return f'"{text}"' if " " in text or not text else text


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES_SHOWN:]
    places = [f"{PurePath(frame.filename).name}:{frame.lineno}" for frame in frames]
    return f"{type(error).__name__} at {'>'.join(places) or 'unknown'}"
