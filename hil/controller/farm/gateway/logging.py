"""Logs as JSON, an object a line: ``{"time": ..., "level": "INFO", "event": "grant", "job": "17.3", ...}``."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

NAME = "hil.farm"
_OWN = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: its time, level and event, then whatever was handed over as ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        """The record in one line."""
        said = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "event": record.getMessage(),
            **{key: value for key, value in record.__dict__.items() if key not in _OWN},
        }
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


def log_json(stream: TextIO | None = None) -> None:
    """Send what this program logs to a stream (stderr): all of the farm's, and warnings of what it uses."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger(NAME).setLevel(logging.INFO)
