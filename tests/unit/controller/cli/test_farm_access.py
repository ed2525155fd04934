"""`hil farm access`, `webhooks`, `login` and `logout`, with fake connections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result
from support.fake_farm_client import parsed
from support.schemas import check_document

from hil.controller.cli.farm.farm import farm
from hil.controller.farm.oidc import device_login
from hil.controller.farm.oidc.login_store import StoredLogin
from hil.controller.farm.paths import open_login_store

ANSWERS: dict[str, Any] = {
    "access": [
        {"board": "rpi5", "access": {"users": ["anna"], "groups": ["vision"]}, "allowed": False, "users": ["anna"]},
        {"board": "sim", "access": {"users": [], "groups": []}, "allowed": True, "users": ["anna", "ben"]},
    ],
    "webhooks": [
        {
            "name": "ci",
            "receiver": "https://ci.example",
            "format": "json",
            "events": ["job_ended"],
            "is_signed": True,
            "waiting": 1,
            "sent": 2,
            "failed": 3,
            "sent_at": None,
            "error": "https://ci.example rejected the message with status 500",
        }
    ],
    "webhook": {"webhook": "ci", "status": 204},
    "me": {"user": "anna", "role": "submitter", "project": "", "rights": [], "groups": ["vision"]},
}


class FakeClient:
    """Fake connection that stores the requests."""

    asked: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def __init__(self, address: Any, **settings: object) -> None:
        self.address = address

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, what: str, **arguments: Any) -> Any:
        self.asked.append((what, arguments))
        return parsed(what, ANSWERS[what])

    do = ask


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeClient.asked = []
    monkeypatch.setattr("hil.controller.farm.client.client.FarmClient", FakeClient)
    monkeypatch.setenv("HIL_FARM", "unix:/nowhere")
    monkeypatch.setenv("HIL_FARM_TOKEN", "token")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def run(*words: str) -> Result:
    return CliRunner().invoke(farm, list(words))


def test_access_shows_boards_and_users() -> None:
    shown = run("access", "--user", "ben")
    assert shown.exit_code == 0, shown.output
    assert FakeClient.asked == [("access", {"user": "ben"})]
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert rows[1] == ["rpi5", "no", "anna,", "group", "vision", "anna"]
    assert rows[2] == ["sim", "yes", "everyone", "anna", "ben"]
    document = json.loads(run("access", "--json").stdout)
    check_document(document, "farm access", "farm")
    assert document["boards"] == ANSWERS["access"]


def test_webhooks_list_and_test() -> None:
    assert "rejected the message" in run("webhooks", "list").stdout
    check_document(json.loads(run("webhooks", "list", "--json").stdout), "farm webhooks list", "farm")
    tested = run("webhooks", "test", "ci")
    assert tested.stdout == "webhook ci accepted the message with status 204\n"
    check_document(json.loads(run("webhooks", "test", "ci", "--json").stdout), "farm webhooks test", "farm")


def test_login_stores_login_of_checked_user(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, str, bool]] = []

    def log_in(issuer: str, client_id: str, *_: Any, uses_id_token: bool, **__: Any) -> StoredLogin:
        given.append((issuer, client_id, uses_id_token))
        return StoredLogin(
            issuer=issuer,
            client_id=client_id,
            token_endpoint="https://x/token",
            token="a.b.c",
            expires_at=0.0,
            uses_id_token=uses_id_token,
        )

    monkeypatch.setattr(device_login, "log_in", log_in)
    missing = run("login")
    assert missing.exit_code != 0 and "missing login provider" in str(missing.exception)
    done = run("login", "--issuer", "https://x", "--client-id", "hil", "--id-token", "--json")
    assert done.exit_code == 0, done.output
    check_document(json.loads(done.stdout), "farm login", "farm")
    assert open_login_store().get_token("unix:/nowhere") == "a.b.c"
    assert run("login").stdout == "logged in to unix:/nowhere as anna with role submitter\n"
    assert given == [("https://x", "hil", True)] * 2
    out = run("logout", "--json")
    check_document(json.loads(out.stdout), "farm logout", "farm")
    assert run("logout").stdout == "no login at unix:/nowhere\n"
