"""Which farm is meant: what is typed, what the environment names, or the one of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.farm.paths import farm_address, farm_home, is_there, socket_of, token_file
from hil.errors import UsageError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A farm's home, and nothing in the environment but its place."""
    for name in ("HIL_FARM", "HIL_FARM_TOKEN", "HIL_FARM_CA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HIL_FARM_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_the_farm_of_this_machine_is_found_by_its_socket_and_its_token(home: Path):
    socket_of(home).touch()
    token_file(home).write_text("secret\n")
    address = farm_address()
    assert (address.gateways, address.token, address.ca) == ((f"unix:{home}/gateway.sock",), "secret", None)


def test_no_farm_is_told_with_how_to_have_one(home: Path):
    with pytest.raises(UsageError, match="no farm runs here") as caught:
        farm_address()
    assert "hil farm up" in caught.value.hint


def test_another_users_farm_is_told(home: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> None:
        raise PermissionError

    assert not is_there(socket_of(home))
    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(UsageError, match="is another user's"):
        farm_address()


def test_the_environment_names_a_farm_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HIL_FARM", "a:1, b:2,")
    monkeypatch.setenv("HIL_FARM_TOKEN", "theirs")
    monkeypatch.setenv("HIL_FARM_CA", str(home / "ca.pem"))
    address = farm_address()
    assert (address.gateways, address.token, address.ca) == (("a:1", "b:2"), "theirs", home / "ca.pem")


def test_what_is_typed_goes_before_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("HIL_FARM", "HIL_FARM_TOKEN", "HIL_FARM_CA"):
        monkeypatch.setenv(name, "environment")
    address = farm_address("typed:1", "mine", home / "mine.pem")
    assert (address.gateways, address.token, address.ca) == (("typed:1",), "mine", home / "mine.pem")


@pytest.mark.parametrize(
    ("gateways", "why"), [("lab", "is no gateway's address"), ("localhost:1,lab.example:7070", "in the clear")]
)
def test_a_gateway_that_cannot_be_called_is_told_before_anybody_tries_to(home: Path, gateways: str, why: str):
    with pytest.raises(UsageError, match=why):
        farm_address(gateways, "token")


def test_a_farm_without_a_token_is_told(home: Path):
    with pytest.raises(UsageError, match="asks for a token") as caught:
        farm_address("a:1")
    assert "HIL_FARM_TOKEN" in caught.value.hint


def test_the_home_is_where_the_variable_says_else_in_the_users_data(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    assert farm_home() == home
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HIL_FARM_HOME", "home")
    assert farm_home() == home
    monkeypatch.delenv("HIL_FARM_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert farm_home() == tmp_path / "data" / "hil" / "farm"


@pytest.mark.parametrize("named", ["lab:7070", "localhost:7070", "unix:/tmp/theirs.sock", "{own},lab:7070"])
def test_the_token_of_this_machines_farm_is_sent_to_no_other(home: Path, monkeypatch: pytest.MonkeyPatch, named: str):
    socket_of(home).touch()
    token_file(home).write_text("secret\n")
    monkeypatch.setenv("HIL_FARM", named.format(own=f"unix:{socket_of(home)}"))
    with pytest.raises(UsageError, match="asks for a token of its own") as caught:
        farm_address()
    assert "HIL_FARM_TOKEN" in caught.value.hint
    monkeypatch.setenv("HIL_FARM_TOKEN", "theirs")
    monkeypatch.setenv("HIL_FARM_CA", "lab.pem")  # without it no token goes to lab
    assert farm_address().token == "theirs"


def test_this_machines_farm_may_be_named_too(home: Path, monkeypatch: pytest.MonkeyPatch):
    socket_of(home).touch()
    token_file(home).write_text("secret\n")
    monkeypatch.setenv("HIL_FARM", f"unix:{socket_of(home)}")
    assert farm_address().token == "secret"
