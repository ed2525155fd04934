"""Test gateway answers: a valid one is parsed, any other raises FarmError."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from support.fake_farm_client import at, board, job, parsed

from hil.controller.cli.main import cli
from hil.controller.farm.client import answers
from hil.controller.farm.client.client import FarmClient
from hil.errors import EXIT_BOARD, FarmError, UsageError

EVENT = {"id": 7, "at": at(1000), "what": "job.done", "board": "pi", "job": "1", "lease": 3, "host": "", "reason": ""}
ATTEMPT = {"lease": 3, "board": "pi", "fence": 4, "part": 0, "granted_at": at(1), "started_at": None, "ended_at": None}
USER = {"user": "ada", "project": "", "running": 1, "queued": 2, "board_s": 1.5}
TOKEN = {
    "id": 1,
    "user": "ada",
    "project": "",
    "role": "admin",
    "note": "",
    "made_at": at(1),
    "good": True,
    "rights": [],
    "groups": [],
}
ENTRY = {"id": 1, "at": at(1), "user": "ada", "role": "admin", "peer": "", "action": "Do", "object": "", "detail": {}}


def listed(name: str, state: str = "queued") -> dict[str, Any]:
    """Return a job without attempts, as lists contain them."""
    return {key: value for key, value in job(name, state).items() if key != "attempts_made"}


ANSWERS: dict[str, Any] = {
    "jobs": [listed("1.1", "done"), listed("1.2")],
    "job": job("1", "done", attempts_made=[{**ATTEMPT, "reason": ""}]),
    "boards": [board("pi", labels={"gpu": True, "mem": 5, "clock": 1.5, "runtimes": ["iree"]})],
    "events": [EVENT],
    "stats": {
        **{"jobs": {"queued": 1}, "boards": {"online": 1}, "queue": {"high": 1}, "matching": 1},
        **{"waiting_s": {"p50": 0.5, "p95": None}, "users": [USER]},
    },
    "tokens": [{**TOKEN, "expires_at": None, "revoked_at": None}],
    "audit": [{**ENTRY, "allowed": False}],
    "logs": [{"number": 1, "job": "1", "text": "x"}],
    "queue": [{**listed("1"), "position": 1, "why": "pi is busy"}],
    "result": [{"name": "1", "state": "done", "exit_code": 0, "spec": {"kind": "run"}, "files": {"a": "b"}}],
}
COMMANDS = {
    "status": ["status"],
    "status of a job": ["status", "1"],
    "boards": ["boards", "--wide"],
    "boards that a selector matches": ["boards", "--select", "mem>=1GiB"],
    "top": ["top"],
    "events": ["events"],
    "tokens": ["token", "list"],
    "audit": ["audit"],
    "logs": ["logs", "1"],
    "result": ["result", "1"],
}
JUNK: tuple[Any, ...] = (None, True, -1, 1 << 80, float("nan"), "x", "9999-12-31T23:59:59+00:00", [], {}, [{}])


def changed(value: Any) -> Iterator[Any]:
    """Yield the answer with each part missing, and with each part replaced by junk."""
    if isinstance(value, dict):
        for key in value:
            yield {name: one for name, one in value.items() if name != key}
            yield from ({**value, key: junk} for junk in JUNK)
            yield from ({**value, key: one} for one in changed(value[key]))
    elif isinstance(value, list):
        yield []
        yield from ([junk] for junk in JUNK)
        yield from ([*value[1:], one] for one in changed(value[0] if value else None))


@pytest.mark.parametrize("question", ANSWERS)
def test_parser_accepts_valid_response(question: str) -> None:
    assert msgspec.to_builtins(parsed(question, ANSWERS[question])) == ANSWERS[question]


@pytest.mark.parametrize("question", ANSWERS)
@pytest.mark.parametrize("answer", [None, 3, "x", [3], {"x": 1}])
def test_parser_rejects_malformed_response(question: str, answer: Any) -> None:
    with pytest.raises(FarmError, match="invalid response from the farm"):
        parsed(question, answer)


def test_parser_rejects_excessive_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_MAX_VALUES", 1000)
    with pytest.raises(FarmError, match="more than 1000 values"):
        parsed("cases", {"total": 1, "cases": [[]] * 2000})


@pytest.mark.ci
@pytest.mark.parametrize("command", COMMANDS)
def test_farm_commands_exit_4_on_malformed_response(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = copy.deepcopy(ANSWERS)
    asked: dict[str, None] = {}

    def ask(self: FarmClient, what: str, **arguments: Any) -> Any:
        asked[what] = None
        return parsed(what, given[what])

    monkeypatch.setenv("HIL_FARM", "unix:/nowhere")
    monkeypatch.setenv("HIL_FARM_TOKEN", "t")
    monkeypatch.setattr(FarmClient, "_connect_within", lambda self, seconds: None)
    monkeypatch.setattr(FarmClient, "ask", ask)
    codes = [CliRunner().invoke(cli, ["farm", *COMMANDS[command]]).exit_code]
    for question in list(asked):
        for wrong in changed(ANSWERS[question]):
            given = {**copy.deepcopy(ANSWERS), question: wrong}
            result = CliRunner().invoke(cli, ["farm", *COMMANDS[command]])
            allowed = (SystemExit, FarmError, UsageError) if question == "result" else (SystemExit, FarmError)
            assert result.exception is None or isinstance(result.exception, allowed), (question, wrong)
            codes.append(getattr(result.exception, "exit_code", result.exit_code))
    assert EXIT_BOARD in codes
