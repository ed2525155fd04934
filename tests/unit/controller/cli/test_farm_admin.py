"""Test the JSON output of commands for farm administrators, with made-up answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.fake_farm_client import board, parsed
from support.schemas import check_document

from hil.controller.cli.farm.farm import farm

ANSWERS: dict[str, Any] = {
    "cancel": {"cancelled": ["17.1", "17.2"]},
    "drain": {},
    "resume": {},
    "forget": {"ended": ["17"]},
    "token": {"token": "secret"},
    "me": {"user": "root", "role": "admin", "project": "", "rights": ["commands", "power"]},
    "revoke": {"user": "anna"},
    "power": {"state": "suspect"},
    "gc": {"counts": {"jobs": 2, "artifacts": 0}, "bytes": 12},
    "boards": [board("pi", "maintenance")],
    "audit": [
        {"id": 1, "at": "2026-11-21T12:00:00+00:00", "user": "anna", "role": "viewer", "peer": "unix:"}
        | {"action": "Farm.Do gc", "object": "", "allowed": False, "detail": {"reason": "requires role admin"}}
    ],
    "tokens": [
        {"id": 7, "user": "anna", "project": "", "role": "viewer", "note": "", "good": True}
        | {"made_at": "2026-11-21T12:00:00+00:00", "expires_at": None, "revoked_at": None}
    ],
}


class Farm:
    """Fake connection with set answers."""

    def __init__(self, address: object, **settings: object) -> None:
        pass

    def __enter__(self) -> Farm:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, what: str, **arguments: Any) -> Any:
        return parsed(what, ANSWERS[what])

    do = ask

    def upload(self, files: Mapping[str, Path]) -> None:
        pass


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        ("cancel", ["17"], ANSWERS["cancel"]),
        ("drain", ["pi"], {"board": "pi", "state": "maintenance"}),
        ("resume", ["gone"], {"board": "gone", "state": "unknown"}),
        ("drain", ["--host", "host1", "--wait"], {"host": "host1", "boards": {"pi": "maintenance"}}),
        ("resume", ["--host", "host1"], {"host": "host1", "boards": {"pi": "maintenance"}}),
        ("forget", ["pi"], {"board": "pi", "ended": ["17"]}),
        (
            "token add",
            ["anna", "--role", "submitter", "--right", "power"],
            {"token": "secret", "user": "anna", "role": "submitter", "project": "", "rights": ["power"], "groups": []},
        ),
        ("token list", [], {"tokens": [{**ANSWERS["tokens"][0], "rights": [], "groups": []}]}),
        ("power", ["pi", "cycle"], {"board": "pi", "action": "cycle", "state": "suspect"}),
        ("token revoke", ["7"], {"revoked": 7, "user": "anna"}),
        ("audit", [], {"audit": ANSWERS["audit"]}),
        ("gc", ["--dry-run"], {"dry_run": True, **ANSWERS["gc"]}),
    ],
)
def test_admin_command_prints_document(
    command: str, words: list[str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hil.controller.farm.client.client.FarmClient", Farm)
    monkeypatch.setenv("HIL_FARM", "unix:/nowhere")
    monkeypatch.setenv("HIL_FARM_TOKEN", "token")
    result = CliRunner().invoke(farm, [*command.split(), *words, "--json"], catch_exceptions=False)
    document = json.loads(result.stdout)
    check_document(document, f"farm {command}", "farm")
    assert document == {"schema": 1, **expected}


def test_token_with_right_that_gateway_ignores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway of an earlier release reports no rights for an administrator."""
    monkeypatch.setattr("hil.controller.farm.client.client.FarmClient", Farm)
    monkeypatch.setenv("HIL_FARM", "unix:/nowhere")
    monkeypatch.setenv("HIL_FARM_TOKEN", "token")
    monkeypatch.setitem(ANSWERS, "me", {"user": "root", "role": "admin", "project": ""})
    monkeypatch.delitem(ANSWERS, "token")
    result = CliRunner().invoke(farm, ["token", "add", "anna", "--role", "submitter", "--right", "power"])
    assert "the gateway does not support the right power, and would ignore it" in str(result.exception)


def invoke(monkeypatch: pytest.MonkeyPatch, *words: str, boards: Any = lambda: ANSWERS["boards"]) -> Any:
    class Changing(Farm):
        def ask(self, what: str, **arguments: Any) -> Any:
            return parsed(what, boards() if what == "boards" else ANSWERS[what])

    monkeypatch.setattr("hil.controller.farm.client.client.FarmClient", Changing)
    monkeypatch.setenv("HIL_FARM", "unix:/nowhere")
    monkeypatch.setenv("HIL_FARM_TOKEN", "token")
    return CliRunner().invoke(farm, words)


def test_drain_waits_for_running_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hil.controller.cli.farm.operate.drain._LOOK_SECONDS", 0.0)
    states = [("draining", "17"), ("draining", "17"), ("maintenance", ""), ("maintenance", "")]

    def read_boards() -> list[dict[str, Any]]:
        # The first answer is for the choice of the host's boards.
        state, job = states.pop(0) if len(states) > 1 else states[0]
        return [board("pi", state, job=job), board("other", "online", host="host2", job="18")]

    done = invoke(monkeypatch, "drain", "--host", "host1", "--wait", boards=read_boards)
    assert done.stdout == "pi is drained\n"
    assert done.stderr.count("waiting for job 17 on pi") == 1 and "18" not in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["drain"], "specify BOARD or --host"),
        (["resume", "pi", "--host", "host1"], "specify BOARD or --host"),
        (["drain", "--host", "hots1"], "host 'hots1' not found"),
    ],
)
def test_drain_rejects_unclear_choice(monkeypatch: pytest.MonkeyPatch, words: list[str], text: str) -> None:
    assert text in str(invoke(monkeypatch, *words).exception)


@pytest.mark.parametrize(
    ("state", "user", "code", "reason"),
    [
        ("online", "", 0, ""),
        ("quarantined", "", 4, "health check failed"),
        ("suspect", "root", 0, "the farm checks the board after your lease"),
        ("quarantined", "root", 4, "health check failed"),
    ],
)
def test_image_ends_with_the_check_or_during_the_users_lease(
    state: str, user: str, code: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "card.img"
    image.write_bytes(b"system")
    found = board("pi", state, user=user, provisions=True, reason="health check failed")
    answers = {"boards": [found], "provision": {"state": state}, "me": {**ANSWERS["me"], "rights": ["provision"]}}
    for name, answer in answers.items():
        monkeypatch.setitem(ANSWERS, name, answer)
    monkeypatch.setattr("hil.controller.farm.client.client.FarmClient", Farm)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("the command waits"))
    monkeypatch.setenv("HIL_FARM", "unix:/nowhere")
    monkeypatch.setenv("HIL_FARM_TOKEN", "token")
    done = CliRunner().invoke(farm, ["provision", "pi", "--image", str(image), "--json"], catch_exceptions=False)
    document = json.loads(done.stdout)
    check_document(document, "farm provision", "farm")
    assert (document["exit_code"], document["state"], document["reason"]) == (code, state, reason)
