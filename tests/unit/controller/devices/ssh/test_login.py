"""The order in which ways to log in are tried, against servers that are objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from paramiko.auth_strategy import AuthFailure

from hil.controller.devices.ssh.login import Login, _worked, exposure
from hil.controller.storage import prompts
from hil.errors import UsageError


class Server:
    """paramiko's transport as far as a login asks it.

    Args:
        needs: the methods that it wants, one after the other: ``publickey``, ``password``, ``keyboard-interactive``.
        keys: the fingerprints that it knows.
        password: the one that is right.
        asks: the questions of keyboard-interactive, each with whether what is typed may be shown.
        hangs_up_after: so many attempts.

    Attributes:
        tried: what was tried, in order.
    """

    def __init__(
        self,
        *needs: str,
        keys: tuple[str, ...] = (),
        password: str = "",
        asks: tuple[tuple[str, bool], ...] = (),
        hangs_up_after: int = 99,
    ) -> None:
        self._left = list(needs)
        self._keys, self._password, self._asks, self._patience = keys, password, asks, hangs_up_after
        self.tried: list[str] = []
        self.answers: list[str] = []
        self.auth_timeout = 0.0

    def is_authenticated(self) -> bool:
        return not self._left

    def is_active(self) -> bool:
        return len(self.tried) < self._patience

    def auth_none(self, username: str) -> list[str]:
        self.tried.append("none")
        if self._left:
            raise paramiko.BadAuthenticationType("no", self._left[:1])
        return []

    def auth_publickey(self, username: str, key: paramiko.PKey) -> list[str]:
        return self._attempt("publickey", key.fingerprint in self._keys)

    def auth_password(self, username: str, password: str, fallback: bool = True) -> list[str]:
        return self._attempt("password", password == self._password)

    def auth_interactive(self, username: str, handler: Callable[..., list[str]]) -> list[str]:
        self.answers = handler("", "", list(self._asks))
        return self._attempt("keyboard-interactive", self.answers[:1] == [self._password])

    def _attempt(self, method: str, right: bool) -> list[str]:
        self.tried.append(method)
        if not self._left or method != self._left[0]:
            raise paramiko.BadAuthenticationType("no", self._left[:1])
        if not right:
            raise paramiko.AuthenticationException("no")
        del self._left[0]
        return self._left[:1]


class Person:
    """Who is asked for secrets: gives what was laid out for a prompt, in order; then nothing."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.knows: list[str] = []

    def ask(self, prompt: str, *, echo: bool = False) -> str:
        self.asked.append(prompt)
        return self.knows.pop(0) if self.knows else ""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home without keys, and no ssh agent."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / ".ssh").mkdir()
    _worked.clear()
    yield tmp_path
    _worked.clear()


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> Person:
    found = Person()
    monkeypatch.setattr(prompts, "ask", found.ask)
    monkeypatch.setattr(prompts, "can_ask", lambda: bool(found.knows))
    return found


def key(path: Path, passphrase: str = "") -> str:
    """Write a private key; returns its fingerprint."""
    secret = serialization.BestAvailableEncryption(passphrase.encode()) if passphrase else serialization.NoEncryption()
    form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    made = ed25519.Ed25519PrivateKey.generate()
    path.write_bytes(made.private_bytes(*form, secret))
    path.chmod(0o600)
    return str(paramiko.PKey.from_path(path, passphrase.encode() or None).fingerprint)


def login(**settings: Any) -> Login:
    return Login(
        "me", "pi", **{"identity": None, "identities": (), "password": "", "only_identities": False, **settings}
    )


def log_in(server: Server, **settings: Any) -> list[str]:
    """What let us in: each source that worked, in words."""
    tried = login(**settings).authenticate(server)
    return [str(one.source) for one in tried if not isinstance(one.result, Exception)]


def test_a_usual_key_is_used_and_nobody_is_asked(home: Path, person: Person) -> None:
    path = home / ".ssh" / "id_ed25519"
    server = Server("publickey", keys=(key(path),))
    assert log_in(server) == [f"the key {path}"]
    assert server.tried == ["publickey"] and person.asked == []


def test_keys_of_the_ssh_config_take_the_place_of_the_usual_ones(home: Path, person: Person) -> None:
    usual, named = home / ".ssh" / "id_ed25519", home / "named"
    server = Server("publickey", keys=(key(usual), key(named)))
    assert log_in(server, identities=(named,)) == [f"the key {named}"]


def test_the_key_that_was_asked_for_comes_first(home: Path, person: Person) -> None:
    first, second = home / "first", home / "second"
    server = Server("publickey", keys=(key(first), key(second)))
    assert log_in(server, identity=first, identities=(second,)) == [f"the key {first}"]


def test_who_has_nothing_is_let_in_where_the_board_lets_everybody_in(person: Person) -> None:
    server = Server()
    tried = login().authenticate(server)
    assert len(tried) == 1 and server.tried == ["none"] and person.asked == []


def test_a_password_is_asked_for_only_where_the_server_takes_one(home: Path, person: Person) -> None:
    person.knows = ["secret"]
    with pytest.raises(AuthFailure):
        log_in(Server("publickey"))
    assert person.asked == []
    assert log_in(Server("password", password="secret")) == ["a password"]
    assert person.asked == ["me@pi's password: "]


def test_a_wrong_password_is_asked_for_three_times_and_the_right_one_remembered(person: Person) -> None:
    person.knows = ["wrong", "wrong", "secret"]
    assert log_in(Server("password", password="secret")) == ["a password"]
    assert len(person.asked) == 3
    assert log_in(Server("password", password="secret")) == ["a password"]
    assert len(person.asked) == 3, "a connection that is made again asks no second time"
    with pytest.raises(AuthFailure):
        log_in(Server("password", password="changed"))


def test_the_password_that_is_set_is_tried_once_and_nobody_asked(person: Person) -> None:
    person.knows = ["other"]
    server = Server("password", password="right")
    with pytest.raises(AuthFailure):
        log_in(server, password="set")
    assert server.tried == ["none", "password"] and person.asked == []


def test_a_server_may_want_several_ways(home: Path, person: Person) -> None:
    path = home / ".ssh" / "id_ed25519"
    server = Server("publickey", "password", keys=(key(path),), password="set")
    assert log_in(server, password="set") == [f"the key {path}", "a password"]


def test_a_passphrase_is_asked_for_until_it_is_right(home: Path, person: Person) -> None:
    path = home / "locked"
    fingerprint = key(path, "open sesame")
    server = Server("publickey", keys=(fingerprint,))
    person.knows = ["wrong", "open sesame"]
    assert log_in(server, identity=path) == [f"the key {path}"]
    assert person.asked == [f"passphrase of {path}: ", f"wrong passphrase; that of {path}: "]
    assert log_in(Server("publickey", keys=(fingerprint,)), identity=path) == [f"the key {path}"]
    assert len(person.asked) == 2, "a connection that is made again asks no second time"


def test_a_key_whose_passphrase_nobody_types_is_named_in_the_error(home: Path, person: Person) -> None:
    path = home / "locked"
    key(path, "open sesame")
    ways = login(identity=path)
    with pytest.raises(AuthFailure) as caught:
        ways.authenticate(Server("publickey"))
    error = ways.refused(caught.value.result, "me@pi", hung_up=False)
    assert f"{path} has a passphrase that nobody typed" in error.hint and "ssh-add" in error.hint


def test_the_error_says_what_was_tried(home: Path, person: Person) -> None:
    path = home / ".ssh" / "id_ed25519"
    key(path)
    ways = login(password="set")
    with pytest.raises(AuthFailure) as caught:
        ways.authenticate(Server("publickey"))
    error = ways.refused(caught.value.result, "me@pi", hung_up=False)
    assert error.message == f"me@pi did not let us in; tried: the key {path}"
    assert "ssh-copy-id me@pi" in error.hint


def test_who_has_no_key_is_told_how_to_name_one(person: Person) -> None:
    ways = login()
    with pytest.raises(AuthFailure) as caught:
        ways.authenticate(Server("publickey"))
    error = ways.refused(caught.value.result, "me@pi", hung_up=False)
    assert "nothing: no usable key, and no password" in error.message and "--identity FILE" in error.hint


def test_one_way_that_is_not_enough_is_told(home: Path, person: Person) -> None:
    fingerprint = key(home / "k")
    ways = login(identity=home / "k")
    with pytest.raises(AuthFailure) as caught:
        ways.authenticate(Server("publickey", "password", keys=(fingerprint,)))
    assert "one way to log in is not enough" in ways.refused(caught.value.result, "me@pi", hung_up=False).message


def test_nothing_more_is_tried_on_a_server_that_hung_up(home: Path, person: Person) -> None:
    for name in ("a", "b"):
        key(home / name)
    server = Server("publickey", hangs_up_after=1)
    ways = login(identities=(home / "a", home / "b"))
    with pytest.raises(AuthFailure) as caught:
        ways.authenticate(server)
    assert server.tried == ["publickey"]
    assert "hung up before it let us in" in ways.refused(caught.value.result, "me@pi", hung_up=True).message


def test_the_servers_questions_are_answered_the_hidden_one_with_the_password_that_is_set(person: Person) -> None:
    asks = (("Password: ", False), ("Code: ", True))
    server = Server("keyboard-interactive", password="set", asks=asks)
    person.knows = ["123456"]
    assert log_in(server, password="set") == ["answers to its questions"]
    assert server.answers == ["set", "123456"] and person.asked == ["me@pi: Code: "]


def test_a_question_that_nobody_answers_ends_the_login(person: Person) -> None:
    server = Server("keyboard-interactive", password="set", asks=(("Code: ", True),))
    with pytest.raises(AuthFailure):
        log_in(server, password="set")
    assert server.answers == []


@pytest.mark.parametrize("text", [None, "no key at all\n"])
def test_an_identity_that_is_none_is_bad_usage_before_anything_is_connected(home: Path, text: str | None) -> None:
    path = home / "identity"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match="cannot read the identity" if text is None else "is no private key"):
        login(identity=path)


def test_a_key_that_others_can_read_is_not_for_sshs_own_client(home: Path, person: Person) -> None:
    path = home / "k"
    fingerprint = key(path)
    path.chmod(0o644)
    assert "permissions 0644" in exposure(path)
    tried = login(identity=path).authenticate(Server("publickey", keys=(fingerprint,)))
    assert not tried[-1].source.plain
    path.chmod(0o600)
    assert exposure(path) == "" and exposure(home / "nothing") == ""
