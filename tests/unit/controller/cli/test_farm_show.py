"""Test farm tables, JSON and the live view with made-up answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from support.fake_farm_client import parsed
from support.schemas import check_document

from hil.controller.cli.farm import show, tables
from hil.controller.cli.farm.show import boards, events, status, top, watch
from hil.errors import UsageError

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=timezone.utc)
LABELS = {
    "name": "rpi-1",
    "site": "lab",
    "chip": "a72",
    "mem": 4 << 30,
    "runtimes": ["iree", "ort"],
    "gpu": True,
}


def at(seconds_ago: float) -> str:
    return (NOW - timedelta(seconds=seconds_ago)).isoformat()


def job(name: str, state: str = "queued", **others: Any) -> dict[str, Any]:
    begun, ended = state in ("running", "done"), state in ("done", "cancelled")
    return {
        "name": name,
        "submission": int(name.partition(".")[0]),
        "title": f"model-{name}.onnx",
        "kind": "run",
        "user": "ada",
        "project": "",
        "priority": "normal",
        "selector": "",
        "board": "rpi-1" if begun else "",
        "boards": [],
        "more": [],
        "pinned": "",
        "state": state,
        "attempts": int(begun),
        "queued_at": at(100),
        "started_at": at(70) if begun else None,
        "finished_at": at(8.5) if ended else None,
        "exit_code": 0 if ended else None,
        "outcome": "PASS" if state == "done" else "",
        "reason": "",
        **others,
    }


def board(name: str, state: str = "online", **others: Any) -> dict[str, Any]:
    return {
        "name": name,
        "site": "lab",
        "host": "bench",
        "hw_type": "rpi",
        "state": state,
        "reason": "",
        "labels": {**LABELS, "name": name},
        "job": "",
        "user": "",
        "since": None,
        "checked_at": at(60),
        "failures": 0,
        "warm": [],
        **others,
    }


STATS = {
    "jobs": {"queued": 3, "running": 1, "done": 7, "cancelled": 0},
    "matching": 0,
    "boards": {"online": 2, "draining": 0, "maintenance": 0, "suspect": 0, "quarantined": 1, "offline": 0},
    "queue": {"high": 1, "normal": 2, "low": 0},
    "waiting_s": {"p50": 0.012, "p95": 75.2},
    "users": [
        {"user": "bob", "project": "", "running": 0, "queued": 2, "board_s": 0.5},
        {"user": "ada", "project": "nets", "running": 1, "queued": 1, "board_s": 7500.0},
    ],
}


class Farm:
    """Fake connection with set answers that records the questions."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[..., Any]] = {
            "stats": lambda **asked: STATS,
            "boards": lambda: [board("rpi-1", job="4", user="ada", since=at(70)), board("rpi-2")],
            "jobs": lambda **asked: [job("5"), job("6", selector="chip=a53")],
            "job": lambda name: {**job(name, "done"), "attempts_made": []},
            "events": lambda **asked: [],
            "queue": lambda jobs: [{**job(name), "position": 2, "why": "rpi-1 is busy"} for name in jobs],
        }
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, address: object, **settings: object) -> Farm:
        return self

    def __enter__(self) -> Farm:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, what: str, **arguments: Any) -> Any:
        self.asked.append((what, arguments))
        return parsed(what, self.answers[what](**arguments))


@pytest.fixture
def farm(monkeypatch: pytest.MonkeyPatch) -> Farm:
    made = Farm()
    monkeypatch.setattr("hil.controller.farm.client.client.FarmClient", made)
    monkeypatch.setenv("HIL_FARM", "unix:/nowhere")
    monkeypatch.setenv("HIL_FARM_TOKEN", "token")
    monkeypatch.setattr(tables, "get_utc_now", lambda: NOW)
    return made


def called(command: Any, *words: str) -> Result:
    return CliRunner().invoke(command, words, standalone_mode=False, catch_exceptions=False)


def document_of(command: Any, *words: str) -> dict[str, Any]:
    """Return the ``--json`` output of a command after validation against docs/farm.schema.json."""
    document = json.loads(called(command, *words, "--json").stdout)
    check_document(document, f"farm {command.name}", "farm")
    return document


def table_of(result: Result, head: str) -> list[list[str]]:
    """Return the rows below a table head as lists of cells."""
    lines = result.stdout.splitlines()
    first = next(number for number, text in enumerate(lines) if text.startswith(head))
    rows = lines[first + 1 :]
    rows = rows[: rows.index("")] if "" in rows else rows
    return [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows]


def test_status_shows_totals_running_and_newest_jobs(farm: Farm):
    done = job("3", "done", exit_code=1, outcome="FAIL", reason="y differs")
    running = job("4", "running")
    farm.answers["jobs"] = lambda state, **asked: [running] if state else [done, job("5"), job("6", selector="gpu")]
    result = called(status)
    assert result.stdout.splitlines()[:2] == [
        "jobs:   3 queued (1 high, 2 normal), 1 running, 7 done, 0 cancelled",
        "boards: 2 online, 1 quarantined; 1 busy",
    ]
    assert table_of(result, "JOB") == [
        ["3", "done", "model-3.onnx", "run", "ada", "normal", "rpi-1", "30s", "1m02s", "FAIL y differs"],
        ["4", "running", "model-4.onnx", "run", "ada", "normal", "rpi-1", "30s", "1m10s"],
        ["5", "queued", "model-5.onnx", "run", "ada", "normal", "1m40s", "place 2: rpi-1 is busy"],
        ["6", "queued", "model-6.onnx", "run", "ada", "normal", "1m40s", "place 2: rpi-1 is busy; for gpu"],
    ]


def test_status_sorts_jobs_by_number(farm: Farm):
    farm.answers["jobs"] = lambda state, **asked: [job("9.10"), job("9.2")] if state else [job("10"), job("9.10")]
    assert [row[0] for row in table_of(called(status), "JOB")] == ["9.2", "9.10", "10"]


def test_status_passes_filters_to_farm(farm: Farm):
    called(status, "--user", "bob", "--state", "queued", "--state", "done", "--limit", "7", "--json")
    assert farm.asked == [
        ("stats", {"state": ["queued", "done"], "user": "bob"}),
        ("jobs", {"state": ["queued", "done"], "user": "bob", "limit": 7}),
        ("queue", {"jobs": ["5", "6"]}),
    ]


def test_status_suggests_user_with_similar_name(farm: Farm):
    farm.answers["jobs"] = lambda user, **asked: [] if user else [job("5"), job("6")]
    assert called(status, "--user", "adda").stderr == "hil: no job of the user 'adda'\n  hint: did you mean 'ada'?\n"
    assert called(status, "--user", "ada").stderr == ""


def test_status_filters_own_failed_and_recent_jobs(farm: Farm):
    farm.answers["me"] = lambda: {"user": "ada", "role": "submitter"}
    # An older gateway ignores the filters.
    farm.answers["jobs"] = lambda **asked: [
        job("4", "done", exit_code=1, queued_at=at(-3600)),
        job("5", "done", exit_code=1),
        job("6", "done", exit_code=0),
        job("7", "running"),
    ]
    shown = called(status, "--mine", "--failed", "--since", "2026-11-01", "--json")
    assert [one["name"] for one in json.loads(shown.stdout)["jobs"]] == ["4", "5"]
    since = datetime(2026, 11, 1).astimezone().timestamp()
    chosen = {"state": [], "user": "ada", "failed": True, "since": since}
    assert farm.asked[:2] == [("me", {}), ("stats", chosen)] and farm.asked[2][1] == {**chosen, "limit": 5000}


@pytest.mark.parametrize("words", [["--mine"], ["--failed"], ["--since", "2h"], ["--user", "ada"]])
def test_status_of_job_rejects_filters(farm: Farm, words: list[str]):
    with pytest.raises(UsageError, match=f"{words[0]} cannot be used with a JOB"):
        called(status, "17", *words)


def test_status_rejects_mine_with_user(farm: Farm):
    with pytest.raises(UsageError, match="mutually exclusive"):
        called(status, "--mine", "--user", "bob")


def test_status_lists_boards_out_of_service_with_reason(farm: Farm):
    out = [board(f"rpi-{number}", "quarantined", reason="health check failed: the disk is full") for number in range(7)]
    farm.answers["boards"] = lambda: [board("rpi-9", reason="old"), *out]
    text = called(status).stdout
    assert (
        "  rpi-4 health check failed: the disk is full\n  and 2 more: hil farm boards\n" in text and "rpi-9" not in text
    )


def test_status_shows_number_of_omitted_jobs(farm: Farm):
    farm.answers["stats"] = lambda **asked: {**STATS, "matching": 11}
    assert "... and 9 older jobs: --limit N shows N jobs, --json shows all" in called(status).stdout
    farm.answers["stats"] = lambda **asked: {**STATS, "matching": 2}
    assert "older" not in called(status).stdout


def test_status_json_includes_all_jobs(farm: Farm, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(show, "_PAGE", 3)
    every = [job(name, "done") for name in ("1", "2.1", "2.2", "3", "4.1", "4.2", "5")]

    def jobs(limit: int, before: str = "", **asked: Any) -> list[dict[str, Any]]:
        names = [one["name"] for one in every]
        return every[: names.index(before) if before else None][-limit:]

    farm.answers["jobs"] = jobs
    assert document_of(status)["jobs"] == every
    assert document_of(status, "--limit", "2")["jobs"] == every[-2:]
    # An older gateway ignores `before`.
    farm.answers["jobs"] = lambda limit, **asked: every[-limit:]
    assert document_of(status)["jobs"] == every[-3:]


def test_status_json_includes_stats_and_jobs(farm: Farm):
    document = document_of(status)
    assert document["schema"] == 1
    assert document["stats"] == STATS
    assert [row["name"] for row in document["jobs"]] == ["5", "6"]


def test_status_of_waiting_job_shows_position_and_reason(farm: Farm):
    farm.answers["job"] = lambda name: {**job(name, selector="gpu"), "attempts_made": []}
    why = "no board matches; rpi-1: has no gpu"
    farm.answers["queue"] = lambda jobs: [{**job(name), "position": 0, "why": why} for name in jobs]
    assert f"waits: no place in the queue: {why}" in called(status, "17.3").stdout.splitlines()
    told = document_of(status, "17.3")["job"]
    assert (told["position"], told["why"]) == (0, why)
    # The job may have started in between.
    farm.answers["queue"] = lambda jobs: []
    assert "waits" not in called(status, "17.3").stdout
    assert "position" not in document_of(status, "17.3")["job"]


def test_status_of_job_lists_attempts(farm: Farm):
    lost = {
        "lease": 4,
        "board": "rpi-1",
        "fence": 8,
        "part": 0,
        "granted_at": at(90),
        "started_at": at(90),
        "ended_at": at(80),
    }
    again = {
        "lease": 5,
        "board": "rpi-2",
        "fence": 3,
        "part": 0,
        "granted_at": at(75),
        "started_at": at(75),
        "ended_at": None,
    }
    attempts = [{**lost, "reason": "no heartbeat from the host"}, {**again, "reason": ""}]
    running = job("17.3", "running", selector="mem>=1GiB", attempts=2, project="nets")
    farm.answers["job"] = lambda name: {**running, "name": name, "attempts_made": attempts}
    result = called(status, "17.3")
    assert farm.asked == [("job", {"name": "17.3"})]
    assert "selector: mem>=1GiB" in result.stdout.splitlines()
    assert [[row[0], row[1], *row[3:]] for row in table_of(result, "ATTEMPT")] == [
        ["1", "rpi-1", "10s", "8", "no heartbeat from the host"],
        ["2", "rpi-2", "1m15s", "3"],
    ]
    document = document_of(status, "17.3")
    assert document["job"]["attempts_made"] == attempts


def test_status_of_submission_lists_all_jobs(farm: Farm):
    farm.answers["jobs"] = lambda submission, limit: [job(f"{submission}.{number}") for number in range(1, 31)]
    assert len(table_of(called(status, "17"), "JOB")) == 30
    assert len(document_of(status, "17")["jobs"]) == 30


def test_status_of_single_job_submission_shows_job(farm: Farm):
    farm.answers["jobs"] = lambda submission, limit: [job("17")]
    assert document_of(status, "17")["job"]["name"] == "17"


@pytest.mark.parametrize("words", [("17", "--user", "ada"), ("x",), ("17.",)])
def test_status_rejects_invalid_job_name(farm: Farm, words: tuple[str, ...]):
    with pytest.raises(UsageError):
        called(status, *words)
    assert farm.asked == []


def test_boards_show_state_and_labels(farm: Farm):
    farm.answers["boards"] = lambda: [
        board("rpi-1", job="4", user="ada", since=at(70)),
        board("rpi-2", "quarantined", reason="health check failed: cut", job="9", user="farm", since=at(3)),
    ]
    labels = "chip=a72 gpu mem=4GiB runtimes=iree,ort"
    assert table_of(called(boards), "BOARD") == [
        ["rpi-1", "online", "4", "ada", "1m10s", "lab/bench", "rpi", labels],
        ["rpi-2", "quarantined", "9 (health)", "farm", "3.00s", "lab/bench", "rpi", "health check failed: cut", labels],
    ]


def test_boards_table_hides_technical_labels(farm: Farm):
    features = [f"feature{number}" for number in range(105)]
    technical = {"features": features, "kernel": "6.1.0", "libc": "glibc 2.36", "agent": "1.0"}
    farm.answers["boards"] = lambda: [board("rpi-1", labels={**LABELS, **technical})]
    assert table_of(called(boards), "BOARD")[0][-1] == "chip=a72 gpu mem=4GiB runtimes=iree,ort"
    wide = called(boards, "--wide").stdout
    assert "feature104" in wide and "kernel=6.1.0" in wide and 'libc="glibc 2.36"' in wide
    assert document_of(boards)["boards"][0]["labels"]["features"] == features
    missed = called(boards, "--select", "features=avx512f").stderr
    assert "feature3 and 101 more" in missed and "feature4" not in missed


def test_boards_select_filters_by_selector(farm: Farm):
    farm.answers["boards"] = lambda: [board("rpi-1"), board("x86", labels={"name": "x86", "chip": "zen"})]
    assert [row[0] for row in table_of(called(boards, "--select", "chip=zen"), "BOARD")] == ["x86"]
    document = document_of(boards, "--select", "chip=zen")
    assert [one["name"] for one in document["boards"]] == ["x86"]


def test_boards_select_suggests_nearest_boards(farm: Farm):
    farm.answers["boards"] = lambda: [board("rpi-1"), board("x86", labels={"name": "x86", "chip": "zen"})]
    result = called(boards, "--select", "chip=a72, mem>=8GiB")
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "no board matches; closest boards:",
        "  rpi-1: mem is 4GiB, not >= 8GiB",
        "  x86: chip is zen, not a72, has no mem",
    ]


def test_boards_reject_invalid_selector_before_call(farm: Farm):
    with pytest.raises(UsageError, match="character 6"):
        called(boards, "--select", "chip=")
    assert farm.asked == []


def test_boards_suggest_host_command_on_empty_farm(farm: Farm):
    farm.answers["boards"] = list
    assert "hil farm host" in called(boards).stderr


def test_top_sorts_users_by_usage(farm: Farm):
    result = called(top)
    assert "waited: median 0.01s, 95th percentile 1m15s" in result.stdout.splitlines()
    assert table_of(result, "USER") == [["ada", "nets", "1", "1", "2h05m"], ["bob", "0", "2", "0.50s"]]
    assert document_of(top) == {"schema": 1, "stats": STATS}


def test_top_handles_unused_farm(farm: Farm):
    farm.answers["stats"] = lambda: {**STATS, "users": [], "waiting_s": {"p50": None, "p95": None}}
    assert called(top).stdout.splitlines()[-1] == "waited: no job started recently"


def test_events_show_reasons(farm: Farm):
    suspect = event(1, board="rpi-1", job="4", lease=3, reason="cut")
    farm.answers["events"] = lambda **asked: [suspect]
    result = called(events, "--board", "rpi-1", "--job", "4", "--limit", "3")
    assert farm.asked == [("events", {"board": "rpi-1", "job": "4", "limit": 3})]
    assert table_of(result, "TIME") == [[tables.to_local_time(suspect["at"]), "board.suspect", "rpi-1", "4", "cut"]]
    assert document_of(events) == {"schema": 1, "events": [suspect]}


def test_status_escapes_control_characters(farm: Farm):
    farm.answers["jobs"] = lambda **asked: [job("5", title="a\x1b[2Jb\r\nc [red]d")]
    printed = called(status).stdout
    assert r"a\x1b[2Jb c [red]d" in printed
    assert "\x1b" not in printed


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 200])
@pytest.mark.parametrize("height", [8, 12, 24, 60])
def test_live_view_fits_any_terminal(width: int, height: int):
    many = [board(f"rpi-{number:03}", job=str(number)) for number in range(120)] + [
        board("bad", "suspect", reason="x" * 99)
    ]
    waiting = [job(str(number), title="long" * 30) for number in range(100)] + [job("200", "running")]
    stats = {**STATS, "jobs": {**STATS["jobs"], "queued": 5000}}
    ended = [job("300", "done"), job("301", "done")]
    shown = view(stats, many, waiting + ended, width, height)
    out = StringIO()
    Console(file=out, width=width, height=height, highlight=False).print(shown)
    lines = out.getvalue().splitlines()
    assert len(lines) < max(height, 14)
    assert all(len(line) <= width for line in lines)
    assert any(line.startswith("bad") for line in lines)
    left_out = [line for line in lines if line.startswith("... and ")]
    assert len(left_out) == 2
    shown_boards = sum(line.startswith(("rpi-", "bad ")) for line in lines)
    assert left_out[0] == f"... and {len(many) - shown_boards} more"
    if height >= 24:
        assert any(line.startswith("200 ") for line in lines)
        shown_jobs = sum(line[:1].isdigit() for line in lines)
        assert left_out[1].startswith(f"... and {5001 - shown_jobs} more")


def test_live_view_shows_everything_in_large_terminal():
    shown = view({**STATS, "jobs": {"queued": 1}}, [board("rpi-1")], [job("3", "done"), job("5")], 120, 40)
    out = StringIO()
    Console(file=out, width=120).print(shown)
    heads = [line.split()[0] for line in out.getvalue().splitlines() if line]
    assert heads == ["jobs:", "boards:", "waited:", "BOARD", "rpi-1", "JOB", "5", "3"]


def view(stats: Any, boards: list[Any], jobs: list[Any], width: int, height: int) -> Any:
    return show.view(parsed("stats", stats), parsed("boards", boards), parsed("jobs", jobs), width, height)


def event(number: int, what: str = "board.suspect", **others: Any) -> dict[str, Any]:
    return {
        "id": number,
        "at": at(0),
        "what": what,
        "board": "",
        "job": "",
        "lease": None,
        "host": "",
        "reason": "",
        **others,
    }


@pytest.fixture
def happening(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """Return the events between two polls; Ctrl-C follows."""
    rounds: list[list[dict[str, Any]]] = []
    happened = [event(number, "job.done") for number in range(1, 8)]

    def sleep(seconds: float) -> None:
        if not rounds:
            raise KeyboardInterrupt
        happened.extend(rounds.pop(0))

    farm.answers["events"] = lambda limit: sorted(happened, key=lambda one: one["id"])[-limit:]
    # Replace only this module's sleep; other threads sleep too.
    monkeypatch.setattr(show, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    return rounds


def test_watch_prints_events_as_lines_to_pipe(happening: list[list[dict[str, Any]]]):
    happening += [[event(9, "job.granted", job="4", board="rpi-1")], [], [event(12, board="rpi-1", reason="cut\n")]]
    result = called(watch)
    assert result.return_value == 0
    assert [line.split("  ", 1)[1] for line in result.stdout.splitlines()] == [
        "job.granted 4 rpi-1",
        "board.suspect rpi-1: cut ",
    ]


def test_watch_prints_every_event(happening: list[list[dict[str, Any]]]):
    happening += [[event(number) for number in range(10, 6010)], [event(6010)]]
    assert len(called(watch).stdout.splitlines()) == 6001


def test_watch_prints_out_of_order_event_without_repeat(happening: list[list[dict[str, Any]]]):
    happening += [[event(12, job="12")], [event(11, job="11")], [], [event(number) for number in range(13, 1013)], []]
    happening += [[event(1013, job="1013")]]
    jobs = [words[3] for line in called(watch).stdout.splitlines() if len(words := line.split()) > 3]
    assert jobs == ["12", "11", "1013"]


def test_watch_json_prints_document_per_line(happening: list[list[dict[str, Any]]]):
    happening += [[event(9, board="rpi-1", reason="cut"), event(10)]]
    found = [json.loads(line) for line in called(watch, "--json").stdout.splitlines()]
    assert found == [event(9, board="rpi-1", reason="cut"), event(10)]
    for one in found:
        check_document(one, "farm watch", "farm")


def test_watch_refreshes_terminal_and_ends_on_interrupt(farm: Farm, monkeypatch: pytest.MonkeyPatch):
    out, looks = StringIO(), []
    monkeypatch.setattr(
        "hil.controller.storage.screen.console.make_table_console",
        lambda: Console(file=out, force_terminal=True, width=100, height=30),
    )

    def stats(**asked: Any) -> dict[str, Any]:
        looks.append(1)
        if len(looks) == 3:
            raise KeyboardInterrupt
        return {**STATS, "jobs": {**STATS["jobs"], "done": 70 + len(looks)}}

    farm.answers["stats"] = stats
    assert called(watch, "--every", "0.1").return_value == 0
    assert "71 done" in out.getvalue()
    assert "72 done" in out.getvalue()
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1  # the cursor is visible again


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-1, "0.00s"), (0, "0.00s"), (9.994, "9.99s"), (10, "10s"), (59.4, "59s"), (59.6, "1m00s"), (3599, "59m59s"),
        (3600, "1h00m"), (7505, "2h05m"), (86399, "23h59m"), (86400, "1d00h"), (200000, "2d07h"),
    ],
)  # fmt: skip
def test_duration_formats_short_text(seconds: float, said: str):
    assert tables.format_duration(seconds) == said
