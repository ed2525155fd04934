from __future__ import annotations

import datetime
import io
import json
import logging
from collections.abc import Iterator

import pytest

from hil.controller.farm.telemetry import NAME, log_json


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, log, written = logging.getLogger(), logging.getLogger(NAME), io.StringIO()
    before = root.handlers[:], log.level
    log_json(written)
    yield written
    root.handlers[:], log.level = before


def test_json_log_writes_record_as_single_line(stream: io.StringIO) -> None:
    log = logging.getLogger(f"{NAME}.gateway")
    log.info("granted", extra={"job": "17.3", "board": "rpi", "lease": 4, "user": "anna\nand a line"})
    log.debug("too much")
    [line] = stream.getvalue().splitlines()
    said = json.loads(line)
    at = datetime.datetime.fromisoformat(said.pop("time").replace("Z", "+00:00"))
    assert abs((datetime.datetime.now(datetime.timezone.utc) - at).total_seconds()) < 10
    known = {"level": "INFO", "event": "granted", "job": "17.3", "board": "rpi", "lease": 4}
    assert said == {**known, "user": "anna\nand a line"}


def test_json_log_includes_warnings_of_libraries(stream: io.StringIO) -> None:
    logging.getLogger("psycopg.pool").warning("error connecting: %s", "refused")
    logging.getLogger("psycopg.pool").info("connected")
    [line] = stream.getvalue().splitlines()
    assert json.loads(line)["event"] == "error connecting: refused"


def test_failure_says_where(stream: io.StringIO) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger(NAME).exception("task.failed", extra={"task": object()})
    [line] = stream.getvalue().splitlines()
    said = json.loads(line)
    assert (said["level"], said["event"]) == ("ERROR", "task.failed")
    assert "test_failure_says_where" in said["traceback"] and "ValueError: broken" in said["traceback"]
