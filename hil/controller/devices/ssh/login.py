"""The ways to log in to a machine over SSH, in the order they are tried: keys in files, those of the ssh agent,
a password, and what the server asks.

Secrets come from the environment or a prompt, never from the command line.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from paramiko.auth_strategy import AuthFailure, AuthResult, AuthSource, NoneAuth, SourceResult
from paramiko.pkey import UnknownKeyType

from hil.controller.devices.ssh.transport import AgentKey, FileKey
from hil.controller.storage import prompts
from hil.errors import BoardRefused, UsageError

PASSWORD_VARIABLE = "HIL_SSH_PASSWORD"
_USUAL = ("id_ed25519", "id_ecdsa", "id_rsa")
_KEY, _PASSWORD, _QUESTIONS = "publickey", "password", "keyboard-interactive"
# As often as ssh asks for a passphrase, or a password.
_SECRET_TRIES = 3
# A server that asks waits for a person; sshd itself waits two minutes.
_PATIENCE_S = 120.0
# A key that paramiko has no use for, such as one that lies in a hardware token.
_FOREIGN = (UnknownKeyType, UnsupportedAlgorithm)
# What was typed and worked, so that a connection that is made again asks no second time: prompt -> secret.
_worked: dict[str, str] = {}


class LoginRefused(BoardRefused):
    """The board answers, but does not let us in."""


class GivenPassword(AuthSource):
    """A password; ``prompt`` is what it was asked for with."""

    def __init__(self, username: str, password: str, prompt: str) -> None:
        super().__init__(username)
        self.password = password
        self.prompt = prompt

    def __str__(self) -> str:
        return "a password"

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Send it."""
        return transport.auth_password(self.username, self.password, fallback=False)


class Questions(AuthSource):
    """What the server itself asks: a password, a code. ``answer`` gives the answer to a prompt, "" ends it."""

    def __init__(self, username: str, answer: Callable[[str, bool], str]) -> None:
        super().__init__(username)
        self.came = False  # whether the server asked anything
        self._answer = answer

    def __str__(self) -> str:
        return "answers to its questions"

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Answer them. paramiko asks in the thread that keeps the connection up, which must not wait for a person."""
        asked: queue.SimpleQueue[list[tuple[str, bool]] | None] = queue.SimpleQueue()
        answered: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()

        def hand_over(title: str, instructions: str, fields: list[tuple[str, bool]]) -> list[str]:
            asked.put(fields)
            answers = answered.get()
            if answers is None:
                raise paramiko.SSHException("nobody answered")
            return answers

        transport.auth_timeout = _PATIENCE_S
        with ThreadPoolExecutor(1, thread_name_prefix="hil-ssh-questions") as pool:
            ending = pool.submit(transport.auth_interactive, self.username, hand_over)
            ending.add_done_callback(lambda _: asked.put(None))
            try:
                while (fields := asked.get()) is not None:
                    self.came = True
                    answers = [self._answer(prompt, echo) for prompt, echo in fields]
                    answered.put(answers if all(answers) else None)
            except BaseException:
                answered.put(None)
                raise
            return ending.result()


class Login:
    """The ways to log in to one machine.

    Args:
        host: what prompts call the machine.
        identity: the key that was asked for, tried first, or None.
        identities: the ssh config's keys; with neither of these, the usual ones of ``~/.ssh`` are tried.
        password: tried last; where it is "" and there is somebody to type, it is asked for.
        only_identities: leave out keys of the agent that are not among these.

    Raises:
        UsageError: the key that was asked for is not there, or is none.
    """

    def __init__(
        self,
        user: str,
        host: str,
        *,
        identity: Path | None,
        identities: tuple[Path, ...],
        password: str,
        only_identities: bool,
    ) -> None:
        self.locked: dict[Path, str] = {}  # the files whose keys could not be had, each with the reason
        self._user = user
        self._host = host
        self._password = password
        self._only_identities = only_identities
        self._silent = False
        home = Path.home() / ".ssh"
        asked = (*([identity] if identity else []), *identities)
        self._files = asked or tuple(home / name for name in _USUAL if (home / name).exists())
        if identity:
            _check(identity)

    def authenticate(self, transport: paramiko.Transport) -> AuthResult:
        """Try one way after the other until the server is content; it may want several of them.

        Raises AuthFailure where none of them, or not enough, would do.
        """
        tried = AuthResult(strategy=cast(Any, self))
        allowed: list[str] = []

        def attempt(source: AuthSource) -> None:
            further: list[str] | Exception
            try:
                allowed[:] = further = source.authenticate(transport)
            except (paramiko.SSHException, OSError, EOFError, ValueError) as error:
                further = error
                if isinstance(error, paramiko.BadAuthenticationType):
                    allowed[:] = error.allowed_types
            tried.append(SourceResult(source, further))

        for method, make in self._methods():
            if method != _KEY and not allowed:
                # Nobody is asked for what the server would not take; and some boards let in who has nothing.
                attempt(NoneAuth(self._user))
            if not transport.is_authenticated() and (not allowed or method in allowed) and (source := make()):
                attempt(source)
            if transport.is_authenticated():
                if isinstance(tried[-1].source, GivenPassword):
                    _worked[tried[-1].source.prompt] = tried[-1].source.password
                return tried
            if not transport.is_active():
                break
        raise AuthFailure(result=tried)

    def refused(self, tried: AuthResult, place: str, hung_up: bool) -> LoginRefused:
        """The error for a server that none of the ways was good enough for, or that ended the connection meanwhile."""
        sources = [one.source for one in tried if getattr(one.source, "came", not isinstance(one.source, NoneAuth))]
        ways = ", ".join(dict.fromkeys(map(str, sources))) or "nothing: no usable key, and no password"
        if self.locked:
            path, why = next(iter(self.locked.items()))
            hint = f"{path} {why}: `ssh-add {path}` gives it to the ssh agent; --identity FILE names another key"
        elif not sources:
            hint = f"name a key with --identity FILE, add one to the ssh agent, or set {PASSWORD_VARIABLE}"
        else:
            hint = f"`ssh-copy-id {place}` puts a key there; --identity FILE names another; "
            hint += f"{PASSWORD_VARIABLE} holds a password"
        what = "hung up before it let us in" if hung_up else "did not let us in"
        if any(one.result and not isinstance(one.result, Exception) for one in tried):
            what += ": one way to log in is not enough for it"
        return LoginRefused(f"{place} {what}; tried: {ways}", hint=hint)

    def _methods(self) -> Iterator[tuple[str, Callable[[], AuthSource | None]]]:
        """Each way in turn: how SSH calls its kind, and what makes it ready, which may mean to ask somebody."""
        agent = paramiko.Agent()
        try:
            offered = {key.asbytes(): AgentKey(self._user, key) for key in agent.get_keys()}
            for path in self._files:
                held = offered.pop(_public_part(path), None)
                yield _KEY, partial(self._key, path, held)
            if not self._only_identities:
                for held in offered.values():
                    yield _KEY, partial(self._key, Path(), held)
        finally:
            agent.close()
        yield from ((_PASSWORD, self._typed) for _ in range(_SECRET_TRIES))
        yield _QUESTIONS, self._questions

    def _key(self, path: Path, held: AgentKey | None) -> FileKey | AgentKey | None:
        """The key that the agent holds, or else the file's."""
        if held is not None:
            return held
        prompt = f"passphrase of {path}: "
        secret = _worked.get(prompt, "")
        for _ in range(_SECRET_TRIES):
            try:
                key = _read(path, secret)
            except OSError:
                return None
            except _FOREIGN:
                self.locked[path] = "is of a kind that hil cannot use by itself"
                return None
            except TypeError:  # so says cryptography of a key that has a passphrase
                pass
            except (ValueError, paramiko.SSHException):
                if not secret:
                    return None
                prompt = f"wrong passphrase; that of {path}: "
            else:
                if secret:
                    _worked[f"passphrase of {path}: "] = secret
                return FileKey(self._user, path, key, plain=not secret and not exposure(path))
            if not (secret := prompts.ask(prompt)):
                break
        self.locked[path] = "has a passphrase that nobody typed"
        return None

    def _typed(self) -> GivenPassword | None:
        """The password that is set, or the one that somebody types; of those who have none nobody asks again."""
        if self._silent:
            return None
        prompt = f"{self._user}@{self._host}'s password: "
        password = self._password or _worked.pop(prompt, "") or prompts.ask(prompt)
        self._silent = not password or password == self._password
        return GivenPassword(self._user, password, prompt) if password else None

    def _questions(self) -> Questions | None:
        answerable = self._password or prompts.can_ask()
        return Questions(self._user, self._answer) if answerable else None

    def _answer(self, prompt: str, echo: bool) -> str:
        """The answer to a question of the server's: the password that is set stands for the first that is hidden."""
        if not echo and self._password:
            password, self._password = self._password, ""
            return password
        return prompts.ask(f"{self._user}@{self._host}: {prompt}", echo=echo)


def _check(identity: Path) -> None:
    """See that a key that was asked for is one, before anything is connected."""
    try:
        _read(identity)
    except (TypeError, *_FOREIGN):
        pass  # it has a passphrase, or is one for the ssh agent
    except OSError as error:
        raise UsageError(f"cannot read the identity {identity}: {error.strerror}") from error
    except (ValueError, paramiko.SSHException) as error:
        raise UsageError(f"{identity} is no private key for SSH", hint="name the file without .pub") from error


def _read(path: Path, passphrase: str = "") -> paramiko.PKey:
    # paramiko hands it on to cryptography, which wants bytes.
    secret: Any = passphrase.encode(errors="surrogateescape") or None
    try:
        return paramiko.PKey.from_path(path, secret)
    except paramiko.SSHException as error:
        # PKCS#8, which it does not read: the same key as OpenSSH writes it.
        pem = serialization.load_pem_private_key(path.read_bytes(), secret)
        form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        text = pem.private_bytes(*form).decode()
        for kind in (paramiko.RSAKey, paramiko.ECDSAKey, paramiko.Ed25519Key):
            with contextlib.suppress(paramiko.SSHException):
                return kind.from_private_key(io.StringIO(text))
        raise error


def _public_part(path: Path) -> bytes:
    """The public key that lies beside a private one, b"" for none: it finds the private key in an agent."""
    try:
        _, data, *_ = path.with_name(f"{path.name}.pub").read_text().split()
        return base64.b64decode(data)
    except (OSError, ValueError, paramiko.SSHException):
        return b""


def exposure(path: Path) -> str:
    """What ssh says of a key's file that others can read, and does not use; "" where it has nothing to say."""
    try:
        found = path.stat()
    except OSError:
        return ""
    if found.st_uid != os.getuid() or not found.st_mode & 0o077:
        return ""
    return f"UNPROTECTED PRIVATE KEY FILE: permissions {found.st_mode & 0o777:04o} for '{path}' are too open"
