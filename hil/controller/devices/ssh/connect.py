"""Connections to SSH servers: fabric's, with its defaults mended; and the ways to log in, in the order they are tried.

fabric takes any host key, reads no known_hosts, and knows no ``ProxyJump none``. Here the key of every machine on the
way is checked against pinned ones before anything is sent to it, and jumps are those of the ssh config. Tried are keys
in files, those of the ssh agent, a password, and what the server asks. Secrets come from the environment or a prompt,
never from the command line.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import getpass
import io
import logging
import os
import queue
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import fabric  # type: ignore[import-untyped]
import paramiko
import tenacity
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from paramiko.auth_strategy import (
    AuthFailure,
    AuthResult,
    AuthSource,
    NoneAuth,
    SourceResult,
)
from paramiko.pkey import UnknownKeyType

from hil.controller.devices.ssh.address import (
    Address,
    KnownHosts,
    name_of,
    parse_address,
    read_ssh_config,
    route,
    settings_for,
    user_files,
)
from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.transport import END_S, AgentKey, FileKey, Hop, Transport, close_hops
from hil.controller.storage import prompts
from hil.core.board_config import Connection
from hil.core.processes import wait_or_kill
from hil.errors import BoardRefused, BoardUnreachable, UsageError

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
    """What the server itself asks: a password, a code.

    Args:
        answer: gives the answer to a prompt that may be shown while it is typed, or not; "" ends it.

    Attributes:
        came: whether the server asked anything.
    """

    def __init__(self, username: str, answer: Callable[[str, bool], str]) -> None:
        super().__init__(username)
        self.came = False
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

    Attributes:
        locked: the files whose keys could not be had, each with the reason.

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
        self.locked: dict[Path, str] = {}
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

        Raises:
            AuthFailure: none of them, or not enough, would do.
        """
        tried = AuthResult(strategy=cast(Any, self))
        allowed: set[str] = set()

        def attempt(source: AuthSource) -> None:
            nonlocal allowed
            further: list[str] | Exception
            try:
                further = source.authenticate(transport)
                allowed = set(further)
            except paramiko.BadAuthenticationType as error:
                further, allowed = error, set(error.allowed_types)
            except (paramiko.SSHException, OSError, EOFError, ValueError) as error:
                further = error
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
            hint = (
                f"`ssh-copy-id {place}` puts a key there; --identity FILE names another; "
                f"{PASSWORD_VARIABLE} holds a password"
            )
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
                yield _KEY, partial(self._from_file, path) if held is None else partial(_itself, held)
            if not self._only_identities:
                yield from ((_KEY, partial(_itself, key)) for key in offered.values())
        finally:
            agent.close()
        yield from ((_PASSWORD, self._typed) for _ in range(_SECRET_TRIES))
        yield _QUESTIONS, self._questions

    def _from_file(self, path: Path) -> FileKey | None:
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


def _itself(source: AuthSource) -> AuthSource:
    return source


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


# paramiko tells of every lost connection with a traceback: neither a terminal nor a test's report (pytest shows what
# comes to the root logger) is the place for it. Whoever wants them adds a handler to this logger.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False

_TRIES = 3
# paramiko's words for a server, or for one behind a jump, that said nothing until the time was over.
_SILENT = ("No existing session", "Timeout opening channel")
# What a shell says of a program that is not there, and of one that it cannot run.
_NOT_FOUND, _NOT_RUN = 127, 126


class NoSuchHost(BoardUnreachable):
    """The board's name leads nowhere."""


class ProxyFailed(BoardUnreachable):
    """The ssh config's ProxyCommand did not lead to the board."""


def connect(address: Address, settings: Connection, *, board: str, base: Path, timeout: float) -> tuple[Hop, ...]:
    """Log in to a machine, through others where the ssh config says so; the last hop is the machine itself.

    Arguments and errors are those of :func:`open_shell`.
    """
    _check_login()
    request = _ConnectRequest(settings, board, base, timeout)
    config = read_ssh_config(address)
    hops: list[Hop] = []
    try:
        for machine in route(config, address):
            hops.append(_MachineLogin(machine, request, config, hops, is_board=machine is address).open())
    except BaseException:
        close_hops(hops)
        raise
    return tuple(hops)


def open_shell(address: str, connection: Connection, *, board: str, base: Path, timeout: float = 10.0) -> Shell:
    """Log in to a board.

    Args:
        base: the folder that relative paths in the config are relative to.
        timeout: seconds for each of: connecting, the server's greeting, logging in.

    Raises:
        UsageError: the address, or a file of the config or of ssh's own, is wrong.
        HostKeyRefused: the host key is not the pinned one, or none is pinned.
        BoardUnreachable: nobody answers, or we are not let in.
    """
    place = parse_address(address)
    return Shell(connect(place, connection, board=board, base=base, timeout=timeout), place, board)


def _check_login() -> None:
    """See that this user has a name and a home, as not everybody in a container has: both are used everywhere below."""
    try:
        Path.home()
        getpass.getuser()
    except (RuntimeError, KeyError, OSError) as error:
        raise UsageError(
            "this login has no name or no home, which SSH needs for its keys and settings",
            hint="set HOME and USER in the environment",
        ) from error


@dataclass(frozen=True)
class _ConnectRequest:
    """What :func:`connect` was asked for."""

    settings: Connection
    board: str
    base: Path
    timeout: float

    @property
    def identity(self) -> Path | None:
        return self._file(self.settings.identity)

    @property
    def known_hosts(self) -> list[Path]:
        path = self._file(self.settings.known_hosts)
        return [path] if path else []

    def _file(self, name: str) -> Path | None:
        try:
            return self.base / Path(name).expanduser() if name else None
        except RuntimeError as error:
            raise UsageError(f"{name} lies in the home of a user that there is not", board=self.board) from error


class _MachineLogin:
    """One machine to log in to, through those of ``via``."""

    def __init__(
        self,
        address: Address,
        request: _ConnectRequest,
        config: paramiko.SSHConfig,
        via: Sequence[Hop],
        *,
        is_board: bool,
    ) -> None:
        self._address = address
        self._request = request
        self._config = fabric.Config(ssh_config=config, lazy=True)
        self._via = via
        self._host = settings_for(config, address.host)
        # What was asked for is meant for the board: a jump's key is looked for where it usually is, too.
        self._is_board = is_board
        self._identity = request.identity if is_board else None
        usual = [] if is_board and request.known_hosts else self._host.known_hosts or user_files()
        self._known_hosts = KnownHosts(
            [*request.known_hosts, *usual],
            accept_new=request.settings.accept_new_host_key,
            board=request.board,
            direct=not via and not self._host.proxy_command,
        )

    def open(self) -> Hop:
        """Log in; a server that is not ready yet is asked again, a few times."""
        asking = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            stop=tenacity.stop_after_attempt(_TRIES) | tenacity.stop_after_delay(self._request.timeout),
            wait=tenacity.wait_exponential(0.2, max=1),
            reraise=True,
        )
        return asking(self._log_in)

    def _log_in(self) -> Hop:
        try:
            connection = fabric.Connection(
                self._address.host,
                user=self._address.user or None,
                port=self._address.port or None,
                config=self._config,
                gateway=self._via[-1].connection if self._via else False,
                forward_agent=False,
                connect_timeout=max(1, round(self._request.timeout)),
            )
        except ValueError as error:
            raise UsageError(f"the ssh config for {self._address.host} is wrong: {error}") from error
        connection.host = connection.host.lower()  # as known_hosts files have it
        login = Login(
            connection.user,
            str(Address(self._address.host, port=connection.port)),
            identity=self._identity,
            identities=self._host.identities,
            password=os.environ.get(PASSWORD_VARIABLE, "") if self._is_board else "",
            only_identities=self._host.only_identities,
        )
        self._known_hosts.guard(connection.client)
        proxy = None
        connection.connect_kwargs = {
            "auth_strategy": login,
            "transport_factory": Transport,
            **dict.fromkeys(("banner_timeout", "auth_timeout", "channel_timeout"), self._request.timeout),
        }
        if self._host.proxy_command and not self._via:
            proxy, connection.connect_kwargs["sock"] = _through(self._host.proxy_command)
        try:
            tried = connection.open()
        except BaseException as error:
            translated = self._translated(error, connection, login)
            connection.client.close()
            if proxy:
                if isinstance(translated, BoardUnreachable):
                    translated = self._proxy_failed(proxy) or translated
                proxy.terminate()
                wait_or_kill(proxy, END_S)
            if translated is error:
                raise
            raise translated from error
        # Of several that were needed together, one that only our own connection has: ssh's client has no other.
        used = [one.source for one in tried if not isinstance(one.result, Exception)]
        source = next((one for one in used if not isinstance(one, (AgentKey, FileKey))), used[-1])
        key = connection.transport.get_remote_server_key()
        return Hop(connection, source, key, self._host.proxy_command if proxy else "", proxy)

    def _translated(self, error: BaseException, connection: fabric.Connection, login: Login) -> BaseException:
        place = Address(connection.host, connection.user, connection.port)
        server = name_of(connection.host, connection.port)
        if isinstance(error, paramiko.BadHostKeyException):
            return self._known_hosts.changed(server, error.key, error.expected_key)
        if isinstance(error, AuthFailure):
            transport = connection.client.get_transport()
            hung_up = transport is None or not transport.is_active()
            return login.refused(error.result, str(place), hung_up).located(board=self._request.board)
        # Of a name that cannot be one, its parts empty or too long, Python says the latter.
        if isinstance(error, (socket.gaierror, UnicodeError)):
            return NoSuchHost(
                f"there is no host {connection.host!r}",
                board=self._request.board,
                hint="is the name right? ssh config is read, too",
            )
        if isinstance(error, TimeoutError) or str(error).startswith(_SILENT):
            return self._unreachable(
                f"{server} did not answer within {self._request.timeout:g} s",
                "is it on, and in this network? try: ping",
            )
        if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
            reasons = "; ".join(sorted({getattr(one, "strerror", None) or str(one) for one in error.errors.values()}))
            return self._unreachable(
                f"{server} cannot be reached: {reasons}",
                "is it on, and in this network? does sshd run there, on that port? another: USER@HOST:PORT",
            )
        if isinstance(error, paramiko.ChannelException):
            return self._unreachable(
                f"{server} cannot be reached from {self._via[-1].connection.host}: {error.text}",
                "is it on, and does that machine allow to go through it?",
            )
        if isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return self._unreachable(
                f"{server} cannot be reached: {error.strerror}", "is it on, and is this machine in its network?"
            )
        if isinstance(error, (OSError, EOFError, paramiko.SSHException)):
            said = str(error) or "the connection was closed"
            return self._unreachable(f"{server} does not go on with SSH: {said}", "is that an SSH server's port?")
        return error

    def _proxy_failed(self, proxy: subprocess.Popen[bytes]) -> ProxyFailed | None:
        """The error for a ProxyCommand that ended by itself; None for one that runs."""
        try:
            code = proxy.wait(END_S)
        except subprocess.TimeoutExpired:
            return None
        command = self._host.proxy_command
        name = command.split()[0]
        why = {
            _NOT_FOUND: f"there is no program {name!r}",
            _NOT_RUN: f"{name!r} cannot be run",
        }.get(code, f"it ended with code {code}")
        return ProxyFailed(
            f"the ProxyCommand to {self._address.host} failed: {why}",
            board=self._request.board,
            hint=f"the ssh config says `{command}`: try it by hand",
        )

    def _unreachable(self, message: str, hint: str) -> BoardUnreachable:
        return BoardUnreachable(message, board=self._request.board, hint=hint)


def _may_pass(error: BaseException) -> bool:
    """Whether a server refuses for the moment: it restarts, or has too many at its door."""
    if isinstance(error, ProxyFailed):
        return False
    cause = error.__cause__
    refused = isinstance(cause, (paramiko.ssh_exception.NoValidConnectionsError, ConnectionError, EOFError))
    return refused or type(cause) is paramiko.SSHException


def _through(command: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A command of the ssh config that stands for a connection, on a socket: paramiko's own never sees its end."""
    ours, its = socket.socketpair()
    with its:
        end = its.fileno()
        process = subprocess.Popen(["/bin/sh", "-c", f"exec {command}"], stdin=end, stdout=end, start_new_session=True)
    return process, ours
