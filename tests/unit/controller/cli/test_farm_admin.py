"""Test the JSON output of commands for farm administrators, with made-up answers."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        ("cancel", ["17"], ANSWERS["cancel"]),
        ("drain", ["pi"], {"board": "pi", "state": "maintenance"}),
        ("resume", ["gone"], {"board": "gone", "state": "unknown"}),
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
