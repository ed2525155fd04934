"""Order of login methods, with fake servers."""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from paramiko.auth_strategy import AuthFailure
from support.sshd import make_key

from hil.controller.devices.ssh.paramiko.login import Login, _read, _worked
from hil.controller.storage.screen import prompts
from hil.core.files import MAX_TEXT_BYTES
from hil.errors import UsageError


class Server:
    """The part of paramiko's transport that a login uses.

    Args:
        needs: required methods in order: ``publickey``, ``password``, ``keyboard-interactive``.
        keys: accepted fingerprints.
        password: accepted password.
        asks: questions of keyboard-interactive, each with its echo flag.
        hangs_up_after: number of attempts before the server disconnects.

    Attributes:
        tried: attempted methods in order.
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
    """A fake prompt that returns prepared answers in order, then empty text."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.knows: list[str] = []

    def ask(self, prompt: str, *, echo: bool = False) -> str:
        self.asked.append(prompt)
        return self.knows.pop(0) if self.knows else ""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set an empty home directory without an ssh agent."""
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
    """Write a private key; return its fingerprint."""
    secret = serialization.BestAvailableEncryption(passphrase.encode()) if passphrase else serialization.NoEncryption()
    form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    made = ed25519.Ed25519PrivateKey.generate()
    path.write_bytes(made.private_bytes(*form, secret))
    path.chmod(0o600)
    return str(paramiko.PKey.from_path(path, passphrase.encode() or None).fingerprint)


def login(**settings: Any) -> Login:
    return Login(
        "me", "pi", **{"identity": None, "identities": None, "password": "", "only_identities": False, **settings}
    )


def log_in(server: Server, **settings: Any) -> list[str]:
    """Log in; return the accepted credentials as text."""
    tried = login(**settings).authenticate(server)
    return [str(one.source) for one in tried if not isinstance(one.result, Exception)]


def test_login_uses_default_key_without_prompt(home: Path, person: Person) -> None:
    path = home / ".ssh" / "id_ed25519"
    server = Server("publickey", keys=(key(path),))
    assert log_in(server) == [f"the key {path}"]
    assert server.tried == ["publickey"] and person.asked == []


def test_login_prefers_config_keys_to_default_keys(home: Path, person: Person) -> None:
    usual, named = home / ".ssh" / "id_ed25519", home / "named"
    server = Server("publickey", keys=(key(usual), key(named)))
    assert log_in(server, identities=(named,)) == [f"the key {named}"]


def test_login_tries_given_identity_first(home: Path, person: Person) -> None:
    first, second = home / "first", home / "second"
    server = Server("publickey", keys=(key(first), key(second)))
    assert log_in(server, identity=first, identities=(second,)) == [f"the key {first}"]


def test_login_tries_none_method_without_credentials(person: Person) -> None:
    server = Server()
    tried = login().authenticate(server)
    assert len(tried) == 1 and server.tried == ["none"] and person.asked == []


def test_login_asks_password_only_if_server_accepts_passwords(home: Path, person: Person) -> None:
    person.knows = ["secret"]
    with pytest.raises(AuthFailure):
        log_in(Server("publickey"))
    assert person.asked == []
    assert log_in(Server("password", password="secret")) == ["a password"]
    assert person.asked == ["me@pi's password: "]


def test_login_retries_password_three_times_and_remembers(person: Person) -> None:
    person.knows = ["wrong", "wrong", "secret"]
    assert log_in(Server("password", password="secret")) == ["a password"]
    assert len(person.asked) == 3
    assert log_in(Server("password", password="secret")) == ["a password"]
    assert len(person.asked) == 3, "a connection that is made again asks no second time"
    with pytest.raises(AuthFailure):
        log_in(Server("password", password="changed"))


def test_login_tries_set_password_once_without_prompt(person: Person) -> None:
    person.knows = ["other"]
    server = Server("password", password="right")
    with pytest.raises(AuthFailure):
        log_in(server, password="set")
    assert server.tried == ["none", "password"] and person.asked == []


def test_login_skips_forbidden_methods(home: Path, person: Person) -> None:
    path = home / ".ssh" / "id_ed25519"
    server = Server("publickey", keys=(key(path),), password="set")
    for forbidden in ("publickey", "password"):
        with pytest.raises(AuthFailure):
            log_in(
                Server(forbidden, keys=server._keys, password="set"), password="set", forbidden=frozenset({forbidden})
            )


def test_login_combines_methods(home: Path, person: Person) -> None:
    path = home / ".ssh" / "id_ed25519"
    server = Server("publickey", "password", keys=(key(path),), password="set")
    assert log_in(server, password="set") == [f"the key {path}", "a password"]


def test_login_asks_passphrase_until_correct(home: Path, person: Person) -> None:
    path = home / "locked"
    fingerprint = key(path, "open sesame")
    server = Server("publickey", keys=(fingerprint,))
    person.knows = ["wrong", "open sesame"]
    assert log_in(server, identity=path) == [f"the key {path}"]
    assert person.asked == [f"passphrase of {path}: ", f"wrong passphrase; passphrase of {path}: "]
    assert log_in(Server("publickey", keys=(fingerprint,)), identity=path) == [f"the key {path}"]
    assert len(person.asked) == 2, "a connection that is made again asks no second time"


def test_login_error_names_locked_key(home: Path, person: Person) -> None:
    path = home / "locked"
    key(path, "open sesame")
    ways = login(identity=path)
    with pytest.raises(AuthFailure) as caught:
        ways.authenticate(Server("publickey"))
    error = ways.make_refused_error(caught.value.result, "me@pi", hung_up=False)
    assert f"{path} needs a passphrase" in error.hint and "ssh-add" in error.hint


def test_login_error_lists_tried_methods(home: Path, person: Person) -> None:
    path = home / ".ssh" / "id_ed25519"
    key(path)
    ways = login(password="set")
    with pytest.raises(AuthFailure) as caught:
        ways.authenticate(Server("publickey"))
    error = ways.make_refused_error(caught.value.result, "me@pi", hung_up=False)
    assert error.message == f"me@pi refused the login; tried: the key {path}"
    assert "ssh-copy-id me@pi" in error.hint


def test_login_error_without_keys_suggests_identity(person: Person) -> None:
    ways = login()
    with pytest.raises(AuthFailure) as caught:
        ways.authenticate(Server("publickey"))
    error = ways.make_refused_error(caught.value.result, "me@pi", hung_up=False)
    assert "none: no usable key, and no password" in error.message and "--identity FILE" in error.hint


def test_login_error_reports_incomplete_methods(home: Path, person: Person) -> None:
    fingerprint = key(home / "k")
    ways = login(identity=home / "k")
    with pytest.raises(AuthFailure) as caught:
        ways.authenticate(Server("publickey", "password", keys=(fingerprint,)))
    assert (
        "requires multiple login methods"
        in ways.make_refused_error(caught.value.result, "me@pi", hung_up=False).message
    )


def test_login_stops_after_server_hangs_up(home: Path, person: Person) -> None:
    for name in ("a", "b"):
        key(home / name)
    server = Server("publickey", hangs_up_after=1)
    ways = login(identities=(home / "a", home / "b"))
    with pytest.raises(AuthFailure) as caught:
        ways.authenticate(server)
    assert server.tried == ["publickey"]
    assert (
        "closed the connection during login"
        in ways.make_refused_error(caught.value.result, "me@pi", hung_up=True).message
    )


def test_login_answers_hidden_question_with_set_password(person: Person) -> None:
    asks = (("Password: ", False), ("Code: ", True))
    server = Server("keyboard-interactive", password="set", asks=asks)
    person.knows = ["123456"]
    assert log_in(server, password="set") == ["keyboard-interactive"]
    assert server.answers == ["set", "123456"] and person.asked == ["me@pi: Code: "]


def test_login_fails_on_unanswered_question(person: Person) -> None:
    server = Server("keyboard-interactive", password="set", asks=(("Code: ", True),))
    with pytest.raises(AuthFailure):
        log_in(server, password="set")
    assert server.answers == []


@pytest.mark.parametrize("text", [None, "no key at all\n"])
def test_login_rejects_invalid_identity_before_connecting(home: Path, text: str | None) -> None:
    path = home / "identity"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match="cannot read the identity" if text is None else "is not a private SSH key"):
        login(identity=path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["/dev/zero", "pipe", "large"])
def test_login_rejects_irregular_identity(home: Path, person: Person, name: str) -> None:
    os.mkfifo(home / "pipe")
    with (home / "large").open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)
    with pytest.raises(UsageError, match="cannot read the identity"):
        login(identity=home / name)
    # Keys of the ssh config are optional.
    with pytest.raises(AuthFailure):
        log_in(Server("publickey"), identities=(home / name,))


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
@pytest.mark.parametrize("form", ["OpenSSH", "TraditionalOpenSSL", "PKCS8"])
@pytest.mark.parametrize("passphrase", ["", "sesame"])
def test_login_reads_common_key_formats(home: Path, person: Person, kind: str, form: str, passphrase: str) -> None:
    if kind == "ed25519" and form == "TraditionalOpenSSL":
        pytest.skip("this format has no Ed25519 keys")
    made = {
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
        "ecdsa": lambda: ec.generate_private_key(ec.SECP256R1()),
        "ed25519": ed25519.Ed25519PrivateKey.generate,
    }[kind]()
    secret = serialization.BestAvailableEncryption(passphrase.encode()) if passphrase else serialization.NoEncryption()
    path = home / "k"
    path.write_bytes(made.private_bytes(serialization.Encoding.PEM, getattr(serialization.PrivateFormat, form), secret))
    path.chmod(0o600)
    public = made.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    blob = base64.b64decode(public.split()[1])
    person.knows = [passphrase] if passphrase else []
    server = Server("publickey", keys=(paramiko.PKey.from_type_string(public.split()[0].decode(), blob).fingerprint,))
    assert log_in(server, identity=path) == [f"the key {path}"]


def test_login_offers_certificate_of_key(home: Path, person: Person) -> None:
    key(home / "authority")
    path = make_key(home / "k")
    sign = ["ssh-keygen", "-q", "-s", home / "authority", "-I", "me", "-n", "me", path.with_name("k.pub")]
    subprocess.run(sign, check=True)
    assert _read(path).public_blob.key_type == "ssh-ed25519-cert-v01@openssh.com"


def test_login_skips_key_readable_by_others(home: Path, person: Person) -> None:
    path = home / "k"
    fingerprint = key(path)
    path.chmod(0o644)
    ways = login(identity=path)
    with pytest.raises(AuthFailure) as caught:
        ways.authenticate(Server("publickey", keys=(fingerprint,)))
    assert "chmod 600" in ways.make_refused_error(caught.value.result, "me@pi", hung_up=False).hint
