"""`hil runs list`, `rm` and `gc`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hil.controller.cli.main import cli
from hil.controller.storage.runs import RunStore
from hil.controller.storage.screen import prompts
from hil.core.results import Outcome
from hil.errors import EXIT_USAGE, UsageError

DAY = 86400.0


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli, ("runs", *words), prog_name="hil", standalone_mode=False)


def shown(*words: str) -> dict:
    result = invoke(*words, "--json")
    assert result.exception is None, result.exception
    return json.loads(result.stdout)


def listed(*words: str) -> list[str]:
    return [row["models"] or row["id"].split("-")[2] for row in shown("list", *words)["runs"]]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    """Runs `a` to `d`, of 4 to 1 days ago; the last is not finished."""
    monkeypatch.chdir(tmp_path)
    # hil's pytest plugin stops capturing while a command looks for a terminal.
    monkeypatch.setattr(prompts, "can_ask", lambda: False)
    store = RunStore()
    for number, (name, labels) in enumerate({"a": ["nightly"], "b": ["nightly", "arm"], "c": [], "d": []}.items()):
        run = store.create(name, {"labels": labels}, f"20260101-000000-{name}-{number}")
        run.record.created = time.time() - (4 - number) * DAY
        run.record.outcome, run.record.exit_code = Outcome.PASS, 0
        run.record.finished = name != "d"
        run.save()
    return store


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ["a", "b", "c", "d"]),
        (("--label", "nightly"), ["a", "b"]),
        (("--label", "nightly", "--label", "arm"), ["b"]),
        (("--limit", "2"), ["c", "d"]),
        (("--label", "nightly", "--limit", "1"), ["b"]),
        (("--since", "60h"), ["c", "d"]),
        (("--since", "2.5d"), ["c", "d"]),
        (("--since", "1h"), []),
        (("--since", "2026-01-01"), ["a", "b", "c", "d"]),
    ],
)
def test_list_selects_runs(store, words, expected):
    assert listed(*words) == expected


def test_list_since_accepts_date_and_time(store):
    run = store.open("20260101-000000-a")
    run.record.created = 1_767_225_600.0  # 2026-01-01 00:00 UTC
    run.save()
    assert "a" in listed("--since", "2026-01-01T01:00+01:00")
    assert "a" not in listed("--since", "2026-01-01T00:30+00:00")


@pytest.mark.parametrize("when", ["whenever", "2026-13-01", "-3d", "0"])
def test_list_rejects_invalid_time(store, when):
    error = invoke("list", "--since", when).exception
    assert isinstance(error, UsageError) and error.exit_code == EXIT_USAGE
    assert error.message == f"invalid --since {when!r}: expected a time"


def test_list_suggests_similar_label(store):
    result = invoke("list", "--label", "nigthly")
    assert result.stdout == ""
    assert "no run has the label 'nigthly'" in result.stderr and "did you mean 'nightly'" in result.stderr


def test_list_shows_labels_in_json(store):
    assert [row["labels"] for row in shown("list", "--limit", "3")["runs"]] == [["nightly", "arm"], [], []]


def test_gc_previews_deletion(store):
    report = shown("gc", "--keep", "1", "--dry-run")
    assert [one.split("-")[2] for one in report["deleted"]] == ["a", "b", "c"] and report["dry_run"]
    assert invoke("gc", "--keep", "3", "--dry-run").stdout.splitlines()[-1] == "would delete 1 run"
    assert len(listed()) == 4
    assert shown("gc", "--keep", "1") == {"schema": 1, "deleted": report["deleted"], "dry_run": False}
    assert listed() == ["d"]


def test_rm_deletes_named_runs(store):
    assert shown("rm", "20260101-000000-a", "20260101-000000-c-2", "20260101-000000-a-0", "--yes")["deleted"] == [
        "20260101-000000-a-0",
        "20260101-000000-c-2",
    ]
    assert listed() == ["b", "d"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("20260101-000000-d-3", "run 20260101-000000-d-3 is not finished"),
        ("20260101", "ambiguous run"),
        ("20260101-000000-a-9", "run '20260101-000000-a-9' not found"),
        ("elsewhere/20260101-000000-e-4", "is not a run in hil-runs"),
        ("hil-runs", "not found"),
    ],
)
def test_rm_deletes_nothing_after_error(store, name, message):
    RunStore(Path("elsewhere")).create("e", {}, "20260101-000000-e-4")
    error = invoke("rm", "20260101-000000-b-1", name, "--yes").exception
    assert isinstance(error, UsageError) and message in error.message
    assert listed() == ["a", "b", "c", "d"]


def test_rm_without_terminal_requires_yes(store, monkeypatch):
    monkeypatch.setattr(prompts, "can_ask", lambda: False)
    error = invoke("rm", "20260101-000000-b-1").exception
    assert isinstance(error, UsageError) and error.hint == "use --yes to confirm"
    assert listed() == ["a", "b", "c", "d"]


def test_unknown_run_suggests_similar_id(store):
    error = invoke("show", "20260101-000000-b-2").exception
    assert isinstance(error, UsageError) and "did you mean " in error.hint and "20260101-000000-b-1" in error.hint


@pytest.mark.parametrize(("answer", "words", "left"), [("y", (), 3), ("n", (), 4), ("", (), 4), ("n", ("--yes",), 3)])
def test_rm_asks_on_terminal(store, monkeypatch, answer, words, left):
    asked = []
    monkeypatch.setattr(prompts, "can_ask", lambda: True)
    monkeypatch.setattr(prompts, "ask", lambda prompt, echo: asked.append(prompt) or answer)
    invoke("rm", "20260101-000000-a-0", *words)
    assert len(listed()) == left
    assert asked == ([] if words else ["delete 20260101-000000-a-0? [y/N] "])
