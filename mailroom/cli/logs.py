"""The log of a command on stderr: a line of text for people, or one JSON object per line for a collector of logs.

Not a library such as python-json-logger, which prints every extra field of every record: those of other packages may
hold values of messages. Only the fields named here are printed.
"""

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import Literal, TypeAlias

LogFormat: TypeAlias = Literal["text", "json"]

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TIME = "%Y-%m-%d %H:%M:%S%z"  # which time it is, also where programs on several machines log into one place
# What our records may say beside their text: the page on logs has them.
FIELDS = ("inbox", "lane", "message_id", "topic", "key", "attempt", "attempts", "outcome", "error", "code", "command")


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. Of an exception it has classes, files, lines and code; no texts, which may hold values."""
        where = getattr(record, "frames", "")
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage().removesuffix(where),
        }
        line |= {name: getattr(record, name) for name in FIELDS if getattr(record, name, None) is not None}
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            where = "".join((*traceback.format_tb(error.__traceback__), type(error).__name__))
        if where:
            line["exception"] = where.strip("\n")
        return json.dumps(line, default=str)


def log_to_stderr(log_format: LogFormat | None, level: int = logging.INFO) -> None:
    """Show what a command logs, from `level` on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT, TIME))
    logging.basicConfig(level=level, handlers=[handler])
    if log_format == "json":
        logging.captureWarnings(True)


def error_line(text: str, code: str | None) -> str:
    """Return the error with which a command ends, as a line of the JSON log."""
    record = logging.makeLogRecord(
        {"name": "mailroom", "levelname": "ERROR", "levelno": logging.ERROR, "msg": "%s", "args": (text,), "code": code}
    )
    return JsonFormatter().format(record)
