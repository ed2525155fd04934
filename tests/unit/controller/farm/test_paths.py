"""Test how the farm is selected: by arguments, by the environment, or the local farm."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hil.controller.farm.paths import (
    SHEET,
    choose_farm_address,
    get_farm_home,
    get_socket_path,
    get_token_file,
    is_there,
)
from hil.errors import UsageError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a farm's home, with only its path in the environment."""
    for name in ("HIL_FARM", "HIL_FARM_TOKEN", "HIL_FARM_CA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HIL_FARM_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_farm_address_finds_local_farm(home: Path):
    get_socket_path(home).touch()
    get_token_file(home).write_text("secret\n")
    address = choose_farm_address()
    assert (address.gateways, address.token, address.ca) == ((f"unix:{home}/gateway.sock",), "secret", None)


def test_farm_address_suggests_starting_farm(home: Path):
    with pytest.raises(UsageError, match="no farm is running") as caught:
        choose_farm_address()
    assert "hil farm up" in caught.value.hint


def test_farm_address_finds_local_farm_during_gateway_restart(home: Path):
    get_token_file(home).write_text("secret\n")
    (home / SHEET).write_text(json.dumps({"pid": os.getpid()}))
    assert choose_farm_address().gateways == (f"unix:{home}/gateway.sock",)


def test_farm_address_rejects_farm_of_other_user(home: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> None:
        raise PermissionError

    assert not is_there(get_socket_path(home))
    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(UsageError, match="belongs to a different user"):
        choose_farm_address()


def test_farm_address_reads_environment(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HIL_FARM", "a:1, b:2,")
    monkeypatch.setenv("HIL_FARM_TOKEN", "theirs")
    monkeypatch.setenv("HIL_FARM_CA", str(home / "ca.pem"))
    address = choose_farm_address()
    assert (address.gateways, address.token, address.ca) == (("a:1", "b:2"), "theirs", home / "ca.pem")


def test_farm_address_prefers_arguments_over_environment(home: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("HIL_FARM", "HIL_FARM_TOKEN", "HIL_FARM_CA"):
        monkeypatch.setenv(name, "environment")
    address = choose_farm_address("typed:1", "mine", home / "mine.pem")
    assert (address.gateways, address.token, address.ca) == (("typed:1",), "mine", home / "mine.pem")


@pytest.mark.parametrize(
    ("gateways", "why"), [("lab", "gateway address"), ("localhost:1,lab.example:7070", "without TLS")]
)
def test_farm_address_rejects_unusable_gateway(home: Path, gateways: str, why: str):
    with pytest.raises(UsageError, match=why):
        choose_farm_address(gateways, "token")


def test_farm_address_requires_token_for_remote_farm(home: Path):
    with pytest.raises(UsageError, match="requires a token") as caught:
        choose_farm_address("a:1")
    assert "HIL_FARM_TOKEN" in caught.value.hint


def test_farm_home_prefers_variable_over_user_data(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
    assert get_farm_home() == home
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HIL_FARM_HOME", "home")
    assert get_farm_home() == home
    monkeypatch.delenv("HIL_FARM_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert get_farm_home() == tmp_path / "data" / "hil" / "farm"


@pytest.mark.parametrize("named", ["lab:7070", "localhost:7070", "unix:/tmp/theirs.sock", "{own},lab:7070"])
def test_farm_address_withholds_local_token_from_other_farms(home: Path, monkeypatch: pytest.MonkeyPatch, named: str):
    get_socket_path(home).touch()
    get_token_file(home).write_text("secret\n")
    monkeypatch.setenv("HIL_FARM", named.format(own=f"unix:{get_socket_path(home)}"))
    with pytest.raises(UsageError, match="requires a token") as caught:
        choose_farm_address()
    assert "HIL_FARM_TOKEN" in caught.value.hint
    monkeypatch.setenv("HIL_FARM_TOKEN", "theirs")
    monkeypatch.setenv("HIL_FARM_CA", "lab.pem")  # without it, no token is sent to lab
    assert choose_farm_address().token == "theirs"


def test_farm_address_accepts_local_socket_by_name(home: Path, monkeypatch: pytest.MonkeyPatch):
    get_socket_path(home).touch()
    get_token_file(home).write_text("secret\n")
    monkeypatch.setenv("HIL_FARM", f"unix:{get_socket_path(home)}")
    assert choose_farm_address().token == "secret"
