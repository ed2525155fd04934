"""Authentication with paramiko.

The methods in order: keys in files, keys of the ssh agent, a password, and keyboard-interactive prompts. Secrets come
from the environment or a prompt, never from the command line.
"""

from __future__ import annotations

import base64
import contextlib
import copy
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
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from paramiko.auth_strategy import (
    AuthFailure,
    AuthResult,
    AuthSource,
    NoneAuth,
    OnDiskPrivateKey,
    SourceResult,
)
from paramiko.pkey import UnknownKeyType

from hil.controller.devices.ssh.errors import LoginRefused
from hil.controller.devices.ssh.paramiko.agent import AgentKey, KeyAgent
from hil.controller.devices.ssh.questions import PASSWORD_VARIABLE
from hil.controller.storage.screen import prompts
from hil.core.files import MAX_TEXT_BYTES, read_file, read_text
from hil.errors import UsageError

_USUAL = ("id_ed25519", "id_ecdsa", "id_rsa")
_KEY, _PASSWORD, _QUESTIONS = "publickey", "password", "keyboard-interactive"
# Number of prompts for a passphrase or a password, as in ssh.
_SECRET_TRIES = 3
# Timeout in seconds for authentication, which may wait for user input. sshd itself waits two minutes.
PATIENCE_SECONDS = 120.0
# Errors for keys that paramiko does not support, such as keys in a hardware token.
_FOREIGN = (UnknownKeyType, UnsupportedAlgorithm)
# Type of a key in cryptography -> type in paramiko.
_KINDS: dict[type, type[paramiko.PKey]] = {
    RSAPrivateKey: paramiko.RSAKey,
    EllipticCurvePrivateKey: paramiko.ECDSAKey,
    Ed25519PrivateKey: paramiko.Ed25519Key,
}
_OPENSSH_BEGIN, _OPENSSH_MAGIC = "-----BEGIN OPENSSH PRIVATE KEY-----", b"openssh-key-v1\0"
# Secrets that worked (prompt -> secret), so that a reconnect does not prompt a second time.
_worked: dict[str, str] = {}


class FileKey(OnDiskPrivateKey):
    """Key in a file."""

    def __init__(self, username: str, path: Path, pkey: paramiko.PKey) -> None:
        super().__init__(username, "python-config", path, pkey)

    def __str__(self) -> str:
        return f"the key {self.path}"


class GivenPassword(AuthSource):
    """Password, with the ``prompt`` that asked for it."""

    def __init__(self, username: str, password: str, prompt: str) -> None:
        super().__init__(username)
        self.password = password
        self.prompt = prompt

    def __str__(self) -> str:
        return "a password"

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Send the password."""
        return transport.auth_password(self.username, self.password, fallback=False)


class PromptAuth(AuthSource):
    """Prompts of the server, such as for a password or a code.

    ``answer`` returns the response to a prompt; "" cancels the authentication.
    """

    def __init__(self, username: str, answer: Callable[[str, bool], str]) -> None:
        super().__init__(username)
        self.came = False  # whether the server sent a prompt
        self._answer = answer

    def __str__(self) -> str:
        return "keyboard-interactive"

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Answer the prompts in this thread.

        paramiko calls back in the transport's thread, which must not wait for user input.
        """
        asked: queue.SimpleQueue[list[tuple[str, bool]] | None] = queue.SimpleQueue()
        answered: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()

        def hand_over(title: str, instructions: str, fields: list[tuple[str, bool]]) -> list[str]:
            asked.put(fields)
            answers = answered.get()
            if answers is None:
                raise paramiko.SSHException("nobody answered")
            return answers

        transport.auth_timeout = PATIENCE_SECONDS
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
    """Authentication methods for one machine.

    Args:
        host: Name of the machine in prompts.
        identity: Key that the user requested, tried first, or None.
        identities: Keys of the ssh config. None means the default keys of ``~/.ssh``, unless ``identity`` is set.
        password: Tried last. If it is "" and a terminal is available, the user is prompted.
        only_identities: Whether to skip other keys of the agent.
        forbidden: Methods that the ssh config disables, by SSH's names.

    Raises:
        UsageError: The requested key does not exist or is not a key.
    """

    def __init__(
        self,
        user: str,
        host: str,
        *,
        identity: Path | None,
        identities: tuple[Path, ...] | None,
        password: str,
        only_identities: bool,
        forbidden: frozenset[str] = frozenset(),
    ) -> None:
        self.locked: dict[Path, str] = {}  # files with unusable keys, each with the reason
        self._user = user
        self._host = host
        self._password = password
        self._only_identities = only_identities
        self._forbidden = forbidden
        self._silent = False
        self._agent_fault = ""
        self._certified: dict[Path, paramiko.PKey] = {}
        home = Path.home() / ".ssh"
        usual = () if identity else tuple(home / name for name in _USUAL if (home / name).exists())
        self._files = (*([identity] if identity else []), *(usual if identities is None else identities))
        if identity:
            _check(identity)

    def authenticate(self, transport: paramiko.Transport) -> AuthResult:
        """Try the methods in order until the server accepts the login. A server may require multiple methods.

        Raises AuthFailure if the server does not accept the login.
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

        for method, make in self._iter_methods():
            if method in self._forbidden:
                continue
            if method != _KEY and not allowed:
                # Query the allowed methods first, so that hil does not prompt for a method that the server does not
                # support. Some boards also accept a login without credentials.
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

    def make_refused_error(self, tried: AuthResult, place: str, hung_up: bool) -> LoginRefused:
        """Return the error for a server that accepted no method or closed the connection."""
        sources = [one.source for one in tried if getattr(one.source, "came", not isinstance(one.source, NoneAuth))]
        unsigned = [one.source for one in tried if isinstance(one.source, AgentKey) and _is_unsigned(one.result)]
        ways = ", ".join(dict.fromkeys(map(str, sources))) or "none: no usable key, and no password"
        if self.locked:
            path, why = next(iter(self.locked.items()))
            hint = f"{path} {why}: add it to the ssh agent with `ssh-add {path}`, "
            hint += "or select a different key: --identity FILE"
        elif not sources:
            hint = f"select a key with --identity FILE, add one to the ssh agent, or set {PASSWORD_VARIABLE}"
        else:
            hint = f"install a key with `ssh-copy-id {place}`, select a different key with --identity FILE, "
            hint += f"or set a password in {PASSWORD_VARIABLE}"
        if unsigned:
            hint = f"the ssh agent did not sign with {unsigned[0].pkey.fingerprint}: the user declined, or the key is "
            hint += "bound to hosts (ssh-add -h), which requires the OpenSSH client; "
            hint += "select a different key: --identity FILE"
        if self._agent_fault:
            hint = f"the ssh agent of SSH_AUTH_SOCK {self._agent_fault}; {hint}"
        if hung_up and len(sources) > 1:
            hint = "the server may accept fewer keys; select a key: --identity FILE, "
            hint += "or IdentityFile and `IdentitiesOnly yes`"
        what = "closed the connection during login" if hung_up else "refused the login"
        if any(one.result and not isinstance(one.result, Exception) for one in tried):
            what += ": the server requires multiple login methods"
        return LoginRefused(f"{place} {what}; tried: {ways}", hint=hint)

    def _iter_methods(self) -> Iterator[tuple[str, Callable[[], AuthSource | None]]]:
        """Yield SSH's name of every method with a function that prepares it. Preparing may prompt the user."""
        agent = KeyAgent()
        self._agent_fault = agent.fault
        try:
            offered = {key.blob: AgentKey(self._user, key) for key in agent.get_keys()}
            for path in self._files:
                held = [offered.pop(blob) for blob in _iter_public_parts(path) if blob in offered]
                for one in held or (None,):
                    yield _KEY, partial(self._choose_key, path, one)
                yield _KEY, partial(self._make_plain_key, path)
            if not self._only_identities:
                for one in offered.values():
                    yield _KEY, partial(self._choose_key, Path(), one)
        finally:
            agent.close()
        yield from ((_PASSWORD, self._choose_password) for _ in range(_SECRET_TRIES))
        yield _QUESTIONS, self._choose_prompt_auth

    def _choose_key(self, path: Path, held: AgentKey | None) -> FileKey | AgentKey | None:
        """Return the key from the agent, or else from the file. Return None if the file's key is not usable."""
        if held is not None:
            return held
        if _read_public(path):
            self.locked[path] = "is a public key, and the ssh agent lacks the private key"
            return None
        if _is_exposed(path):
            self.locked[path] = "is readable by other users, and ssh would ignore it (chmod 600)"
            return None
        prompt = f"passphrase of {path}: "
        secret = _worked.get(prompt, "")
        for _ in range(_SECRET_TRIES):
            try:
                key = _read(path, secret)
            except OSError:
                return None
            except _FOREIGN:
                self.locked[path] = "has a type that is unsupported without the OpenSSH client"
                return None
            except TypeError:  # cryptography raises TypeError for a key that has a passphrase
                pass
            except (ValueError, paramiko.SSHException):
                if not secret:
                    return None
                prompt = f"wrong passphrase; passphrase of {path}: "
            else:
                if secret:
                    _worked[f"passphrase of {path}: "] = secret
                if key.public_blob:
                    self._certified[path] = key
                return FileKey(self._user, path, key)
            if not (secret := prompts.ask(prompt)):
                break
        self.locked[path] = "needs a passphrase"
        return None

    def _make_plain_key(self, path: Path) -> FileKey | None:
        """Return the key without the certificate, after the server rejected the certificate."""
        if (key := self._certified.get(path)) is None:
            return None
        plain = copy.copy(key)
        plain.public_blob = None
        return FileKey(self._user, path, plain)

    def _choose_password(self) -> GivenPassword | None:
        """Return the configured password, or prompt for a password.

        After an empty reply, do not prompt a second time.
        """
        if self._silent:
            return None
        prompt = f"{self._user}@{self._host}'s password: "
        password = self._password or _worked.pop(prompt, "") or prompts.ask(prompt)
        self._silent = not password or password == self._password
        return GivenPassword(self._user, password, prompt) if password else None

    def _choose_prompt_auth(self) -> PromptAuth | None:
        answerable = self._password or prompts.can_ask()
        return PromptAuth(self._user, self._answer_prompt) if answerable else None

    def _answer_prompt(self, prompt: str, echo: bool) -> str:
        """Answer a prompt of the server. The configured password answers the first hidden prompt."""
        if not echo and self._password:
            password, self._password = self._password, ""
            return password
        return prompts.ask(f"{self._user}@{self._host}: {prompt}", echo=echo)


def _is_unsigned(result: object) -> bool:
    """Return whether the server never received the key because signing failed."""
    return isinstance(result, (paramiko.SSHException, OSError)) and not isinstance(
        result, paramiko.AuthenticationException
    )


def _check(identity: Path) -> None:
    """Check the requested key before connecting."""
    if _read_public(identity):
        return
    try:
        _read(identity)
    except (TypeError, *_FOREIGN):
        pass  # it has a passphrase, or only the ssh agent can use it
    except OSError as error:
        raise UsageError(f"cannot read the identity {identity}: {error.strerror}") from error
    except (ValueError, paramiko.SSHException) as error:
        raise UsageError(f"{identity} is not a private SSH key", hint="select the file without .pub") from error


def _read(path: Path, passphrase: str = "") -> paramiko.PKey:
    # paramiko passes the passphrase to cryptography, which requires bytes.
    secret: Any = passphrase.encode(errors="surrogateescape") or None
    # paramiko reads files of any kind and size, so read the file here.
    data = read_file(path, MAX_TEXT_BYTES)
    loaded: Any
    try:
        loaded = serialization.load_ssh_private_key(data, secret)
    except ValueError:
        loaded = serialization.load_pem_private_key(data, secret)
    kind = next((kind for form, kind in _KINDS.items() if isinstance(loaded, form)), None)
    if kind is None:
        raise UnknownKeyType(key_type=type(loaded).__name__)
    # paramiko does not read PKCS#8, so convert the key to OpenSSH's format.
    form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    key: paramiko.PKey = kind.from_private_key(io.StringIO(loaded.private_bytes(*form).decode()))
    with contextlib.suppress(FileNotFoundError):
        key.load_certificate(read_text(path.with_name(f"{path.name}-cert.pub")))
    return key


def _iter_public_parts(path: Path) -> Iterator[bytes]:
    """Yield the certificate and public key of a key file, if available.

    The certificate and the public key identify the key in an agent.
    """
    for beside in (f"{path.name}-cert.pub", f"{path.name}.pub", path.name):
        if found := _read_public(path.with_name(beside)):
            yield found
    if found := _read_public_half(path):
        yield found


def _read_public(path: Path) -> bytes:
    """Read a public key file in ``ssh-keygen`` format. Return b"" if it is not valid."""
    try:
        # Comments may have any encoding.
        kind, data, *_ = read_text(path, errors="replace").split()
        found = base64.b64decode(data)
        return found if found.startswith(len(kind).to_bytes(4, "big") + kind.encode()) else b""
    except (OSError, ValueError):
        return b""


def _read_public_half(path: Path) -> bytes:
    """Read the unencrypted public key from an OpenSSH private key file. Return b"" on failure."""
    try:
        pem = read_text(path).partition(_OPENSSH_BEGIN)[2].partition("-----END")[0]
        message = paramiko.Message(base64.b64decode(pem).removeprefix(_OPENSSH_MAGIC))
    except (OSError, ValueError):
        return b""
    for _ in ("cipher", "kdf", "its options"):
        message.get_binary()
    return message.get_binary() if message.get_int() == 1 else b""


def _is_exposed(path: Path) -> bool:
    """Return whether ssh would ignore a key because other users can read the file."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and bool(found.st_mode & 0o077)
