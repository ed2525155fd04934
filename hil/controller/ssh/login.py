"""Ways to log in, in the order they are tried: keys in files, keys of the ssh agent, a password.

Secrets come from the environment or a prompt, never from the command line.
"""

from __future__ import annotations

import base64
import getpass
import sys
from collections.abc import Iterator
from pathlib import Path

import paramiko
from paramiko.auth_strategy import AuthResult, AuthSource, AuthStrategy, InMemoryPrivateKey, OnDiskPrivateKey, Password

from hil.errors import BoardUnreachable, UsageError

PASSWORD_VARIABLE = "HIL_SSH_PASSWORD"
_USUAL = ("id_ed25519", "id_ecdsa", "id_rsa")
# What was typed and worked, so that a connection that is made again asks no second time: prompt -> secret.
_worked: dict[str, str] = {}


class LoginRefused(BoardUnreachable):
    """The board answers, but does not let us in."""


class AgentKey(InMemoryPrivateKey):
    """A key that the ssh agent holds."""

    def __str__(self) -> str:
        return f"the agent's key {self.pkey.fingerprint}"


class FileKey(OnDiskPrivateKey):
    """A key in a file; ``prompt`` is what its passphrase was asked for with, "" where it has none."""

    def __init__(self, username: str, path: Path, pkey: paramiko.PKey, prompt: str = "") -> None:
        super().__init__(username, "python-config", path, pkey)
        self.prompt = prompt

    def __str__(self) -> str:
        return f"the key {self.path}"


class TypedPassword(Password):
    """A password, and what it was asked for with."""

    def __init__(self, username: str, password: str, prompt: str) -> None:
        super().__init__(username, lambda: password)
        self.prompt = prompt

    def __str__(self) -> str:
        return "a password"


class Login(AuthStrategy):
    """The ways to log in to one machine.

    Args:
        user: who logs in.
        host: what prompts call the machine.
        identity: the key that was asked for, tried first, or None.
        identities: the ssh config's keys; with neither of these, the usual ones of ``~/.ssh`` are tried.
        password: tried last; where it is "" and there is somebody to type, it is asked for.
        only_identities: leave out keys of the agent that are not among these.

    Attributes:
        locked: the files whose keys could not be had without a passphrase.

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
        super().__init__(ssh_config=None)  # type: ignore[arg-type]
        self.locked: list[Path] = []
        self._user = user
        self._host = host
        self._password = password
        self._only_identities = only_identities
        home = Path.home() / ".ssh"
        asked = (*([identity] if identity else []), *identities)
        self._files = asked or tuple(home / name for name in _USUAL if (home / name).exists())
        self._asked: dict[str, str] = {}
        if identity:
            _check(identity)

    def get_sources(self) -> Iterator[AuthSource]:
        """Each way in turn."""
        agent = paramiko.Agent()
        try:
            offered = {key.asbytes(): AgentKey(self._user, key) for key in agent.get_keys()}
            for path in self._files:
                if source := offered.pop(_public_part(path), None) or self._from_file(path):
                    yield source
            if not self._only_identities:
                yield from offered.values()
        finally:
            agent.close()
        prompt = f"{self._user}@{self._host}'s password: "
        if password := self._password or self._ask(prompt):
            yield TypedPassword(self._user, password, prompt)

    def refused(self, tried: AuthResult, place: str, hung_up: bool) -> LoginRefused:
        """The error for a server that none of the ways was good enough for, or that ended the connection meanwhile."""
        ways = ", ".join(str(one.source) for one in tried) or "nothing: there was no key and no password"
        if self.locked:
            hint = f"{self.locked[0]} has a passphrase: unlock it with `ssh-add {self.locked[0]}`"
        elif not tried:
            hint = f"name a key with --identity FILE, add one to the ssh agent, or set {PASSWORD_VARIABLE}"
        else:
            hint = (
                f"`ssh-copy-id {place}` puts a key there; --identity FILE names another; "
                f"{PASSWORD_VARIABLE} holds a password"
            )
        what = "hung up before it let us in" if hung_up else "did not let us in"
        return LoginRefused(f"{place} {what}; tried: {ways}", hint=hint)

    def remember(self, source: AuthSource) -> None:
        """Keep what was typed for the source that worked, as long as this process lives."""
        prompt = getattr(source, "prompt", "")
        if prompt in self._asked:
            _worked[prompt] = self._asked[prompt]

    def _from_file(self, path: Path) -> FileKey | None:
        try:
            return FileKey(self._user, path, paramiko.PKey.from_path(path))
        except (OSError, ValueError, paramiko.SSHException):
            return None
        except TypeError:  # so says cryptography of a key that has a passphrase
            prompt = f"passphrase of {path}: "
        try:
            if secret := self._ask(prompt):
                return FileKey(self._user, path, paramiko.PKey.from_path(path, secret), prompt)
        except (ValueError, paramiko.SSHException):
            pass
        self.locked.append(path)
        return None

    def _ask(self, prompt: str) -> str:
        """What was typed, "" where nobody is there to type."""
        if prompt in _worked:
            return _worked[prompt]
        if not (sys.stdin and sys.stdin.isatty()):
            return ""
        try:
            self._asked[prompt] = getpass.getpass(prompt)
        except EOFError:  # Ctrl-D: whoever was asked has no answer
            return ""
        return self._asked[prompt]


def _check(identity: Path) -> None:
    """See that a key that was asked for is one, before anything is connected."""
    try:
        paramiko.PKey.from_path(identity)
    except TypeError:
        pass  # it has a passphrase
    except OSError as error:
        raise UsageError(f"cannot read the identity {identity}: {error.strerror}") from error
    except (ValueError, paramiko.SSHException) as error:
        raise UsageError(f"{identity} is no private key for SSH", hint="name the file without .pub") from error


def _public_part(path: Path) -> bytes:
    """The public key that lies beside a private one, b"" for none: it finds the private key in an agent."""
    try:
        _, data, *_ = path.with_name(f"{path.name}.pub").read_text().split()
        return base64.b64decode(data)
    except (OSError, ValueError, paramiko.SSHException):
        return b""
