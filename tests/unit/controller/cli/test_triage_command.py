"""`hil triage`: list, set, remove, export and import."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.web import asking

from hil.controller.cli.main import cli
from hil.controller.web.publish import known_failures
from hil.controller.web.publish.known_failures import load_known
from hil.controller.web.publish.web_client import ServerResponse
from hil.errors import HilError, UsageError

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(cli, ["triage", *words], standalone_mode=False)


def test_set_adds_and_changes_entry(run: Run, tmp_path: Path) -> None:
    assert run("set", "conv1", "--board", "evk1", "--owner", "ada", "--outcome", "FAIL").exception is None
    shown = run("set", "conv1", "--board", "evk1", "--state", "wontfix", "--until", "2030-12-31", "--json")
    (entry,) = json.loads(shown.output)["entries"]
    assert (entry["owner"], entry["state"], entry["until"], entry["outcomes"]) == (
        "ada",
        "wontfix",
        "2030-12-31",
        ["FAIL"],
    )
    # A different state needs no last day.
    (entry,) = json.loads(run("set", "conv1", "--board", "evk1", "--state", "known", "--json").output)["entries"]
    assert (entry["state"], entry["until"]) == ("known", None)
    assert len(load_known(str(tmp_path / "hil-triage.json")).entries) == 1


def test_new_outcomes_apply_to_both_stages(run: Run, tmp_path: Path) -> None:
    (tmp_path / "expected.toml").write_text('[[run]]\ncases = "conv1"\noutcome = "FAIL"\nreason = "x"\n')
    assert json.loads(run("import", "expected.toml", "--json").output)["entries"][0]["stage"] == "run"
    (entry,) = json.loads(run("set", "conv1", "--outcome", "TIMEOUT", "--json").output)["entries"]
    assert (entry["outcomes"], entry["stage"]) == (["TIMEOUT"], "")


def test_list_filters_by_state(run: Run) -> None:
    run("set", "conv1", "--state", "known", "--note", "rounds")
    run("set", "fc1")
    assert "conv1" in run("list").output and "fc1" in run("list").output
    listed = json.loads(run("list", "--state", "new", "--json").output)
    assert [one["case"] for one in listed["entries"]] == ["fc1"]


def test_remove_reports_missing_entry(run: Run) -> None:
    run("set", "conv1", "--board", "evk1")
    missing = run("remove", "conv1").exception
    assert isinstance(missing, UsageError) and "no entry for 'conv1'" in missing.message
    assert run("remove", "conv1", "--board", "evk1").output.strip() == "removed conv1"
    assert json.loads(run("list", "--json").output)["entries"] == []


def test_export_and_import_round_trip(run: Run, tmp_path: Path) -> None:
    run("set", "conv1", "--state", "known", "--outcome", "FAIL", "--note", "rounds", "--suite", "nets")
    run("set", "fc1")
    exported = run("export", "--suite", "nets", "--output", "expected.toml")
    assert "left out: fc1: new" in exported.stderr and "wrote expected.toml" in exported.output
    text = (tmp_path / "expected.toml").read_text()
    assert text == run("export").stdout
    assert run("import", "expected.toml", "--suite", "nets", "--file", "other.json").output.strip() == (
        "imported 1 entry into other.json"
    )
    assert load_known("other.json").entries[0].note == "rounds" == load_known("expected.toml").entries[0].note


def test_export_warns_about_patterns(run: Run) -> None:
    run("set", "conv*", "--state", "known", "--outcome", "FAIL")
    exported = run("export")
    assert "passing cases that match conv* become XPASS" in exported.stderr and "XPASS" not in exported.stdout
    run("remove", "conv*")
    run("set", "conv1", "--state", "known", "--outcome", "FAIL")
    assert "XPASS" not in run("export").output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["set", "conv1", "--state", "wontfix"], "wontfix requires a last day"),
        (["set", "conv1", "--state", "wontfix", "--until", "2020-12-31"], "--until 2020-12-31 is in the past"),
        (["set", "conv1", "--outcome", "BAD"], "unknown outcome 'BAD'"),
        (["list", "--file", "none.json"], "none.json not found"),
        (["list", "--file", "x" * 5000], "xxx not found"),
        (["export"], "hil-triage.json not found"),
        (["import", "none.toml"], "none.toml not found"),
        (["set", "conv1", "--file", "none/x.json"], "directory none not found"),
    ],
)
def test_bad_input_is_usage_error(run: Run, words: list[str], text: str) -> None:
    error = run(*words).exception
    assert isinstance(error, HilError) and text in error.message and error.exit_code == 2 and error.hint


def test_known_failures_are_read_from_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    run("set", "conv1", "--state", "known")
    with asking(tmp_path) as client:

        def ask(self: object, method: str, path: str, body: bytes) -> ServerResponse:
            answer = client.request(method, path, content=body)
            return ServerResponse(answer.status_code, answer.json())

        monkeypatch.setattr(known_failures.WebClient, "ask", ask)
        assert [one.case for one in load_known("http://127.0.0.1:8790/").entries] == ["conv1"]
        assert [one.case for one in load_known("http://127.0.0.1:8790/triage.json").entries] == ["conv1"]
        assert [one.case for one in load_known("http://[::1]:8790/triage.json?token=a").entries] == ["conv1"]
        (tmp_path / "hil-triage.json").write_text("{")
        monkeypatch.setattr(known_failures.WebClient, "ask", lambda *_: ServerResponse(200, {"schema": 1}))
        with pytest.raises(UsageError, match="is not a triage file"):
            load_known("http://127.0.0.1:8790/")


def test_token_is_not_sent_unencrypted_to_other_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_WEB_TOKEN", "secret")
    with pytest.raises(UsageError, match="unencrypted") as caught:
        load_known("http://192.0.2.1:8790/")
    # --known has no such option.
    assert caught.value.hint and "--plain-http" not in caught.value.hint
