"""Parser for the subset of the ssh config that hil supports on a machine without ``ssh``.

Unsupported keywords, patterns and tokens raise UsageError if they change the destination or method of the login.
``docs/boards.md`` lists the supported keywords.
"""

from __future__ import annotations

import getpass
import glob
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hil.controller.devices.ssh.address import SSH_PORT, Address, parse_address
from hil.core.files import read_text
from hil.errors import UsageError

_SYSTEM = Path("/etc/ssh")
_DEEPEST = 16
# Keywords that disable an authentication method with "no" -> SSH's name of the method.
_METHODS = {
    "pubkeyauthentication": "publickey",
    "passwordauthentication": "password",
    "kbdinteractiveauthentication": "keyboard-interactive",
    "challengeresponseauthentication": "keyboard-interactive",
}
_ONCE = {
    *("hostname", "user", "port", "identitiesonly", "userknownhostsfile", "proxyjump", "proxycommand"),
    *("connecttimeout", "stricthostkeychecking", "checkhostip", *_METHODS),
}
_READ = {*_ONCE, "identityfile"}
# Keywords to ignore, because they do not change the destination or method of the login.
_HARMLESS = re.compile(
    r"addkeystoagent|batchmode|compression|connectionattempts|control(master|path|persist)|escapechar"
    r"|exitonforwardfailure|forwardagent|forwardx11\w*|gssapi\w*|hashknownhosts|ignoreunknown|localcommand|\w+forward"
    r"|loglevel|logverbose|permitlocalcommand|remotecommand|requesttty|sendenv|setenv|serveralive\w+|stdinnull|tcpkeepalive|tunnel\w*"
    r"|numberofpasswordprompts|updatehostkeys|usekeychain|visualhostkey|ipqos|xauthlocation|clearallforwardings"
)
NO_SSH_HINT = "install the OpenSSH client, which supports all settings, or remove this setting"
_WORDS = {"yes": True, "true": True, "no": False, "false": False}


@dataclass(frozen=True)
class _Value:
    """Value of a keyword, with the location in the config for messages."""

    text: str
    where: str

    @property
    def is_none(self) -> bool:
        return self.text.lower() == "none"

    def make_error(self, what: str, hint: str = "") -> UsageError:
        """Return the error for an invalid or unsupported value."""
        return UsageError(f"{self.where}: {what}", hint=hint)

    def split(self) -> list[_Value]:
        """Split the value into words. ``none`` has no words."""
        return [] if self.is_none else [_Value(word, self.where) for word in shlex.split(self.text)]

    def is_yes(self) -> bool:
        if (found := _WORDS.get(self.text.lower())) is None:
            raise self.make_error(f"expected yes or no, got {self.text!r}")
        return found


@dataclass(frozen=True)
class HostSettings:
    """Settings of the ssh config for a host."""

    address: Address  # host, user and port for the login; the user is "" if not set
    identities: tuple[Path, ...] | None = None  # None to use the default identities
    only_identities: bool = False  # whether to skip other keys of the agent
    known_hosts: tuple[Path, ...] | None = None  # files of pinned host keys; None to use the default files
    jumps: tuple[Address, ...] = ()  # jump hosts, the nearest first
    proxy_command: str = ""  # command that replaces the TCP connection, or ""
    accept_new_host_key: bool = False  # whether to pin the key of an unknown host
    forbidden: frozenset[str] = frozenset()  # disabled authentication methods, by SSH's names
    connect_timeout: float | None = None  # seconds; None to use hil's default


def read_settings(address: Address) -> HostSettings:
    """Resolve an address with the user's and the system's config.

    Raises UsageError if a config is invalid or uses unsupported settings.
    """
    found: dict[str, _Value] = {}
    identities: list[_Value] = []
    user = Path.home() / ".ssh"
    for path, folder in ((user / "config", user), (_SYSTEM / "ssh_config", _SYSTEM)):
        for keyword, value in _iter_settings(path, folder, address.host, is_system=folder is _SYSTEM):
            if keyword == "identityfile":
                identities.append(value)
            elif keyword == "proxyjump" and "proxycommand" in found:
                continue  # the first of ProxyJump and ProxyCommand takes effect
            elif keyword != "proxycommand" or "proxyjump" not in found:
                found.setdefault(keyword, value)

    def get(keyword: str, default: str) -> _Value:
        return found.get(keyword, _Value(default, ""))

    host = _expand_tokens(get("hostname", "%h"), {"h": address.host}).lower()
    port = address.port or _parse_port(get("port", str(SSH_PORT)))
    login = address.user or get("user", "").text
    tokens = {"h": host, "n": address.host, "p": str(port), "r": login or getpass.getuser(), "u": getpass.getuser()}
    tokens["d"] = str(Path.home())
    jumps = _parse_jumps(get("proxyjump", "none"))
    proxy = get("proxycommand", "none")
    known = found.get("userknownhostsfile")
    if get("checkhostip", "no").is_yes():
        raise found["checkhostip"].make_error("`CheckHostIP yes` requires the ssh program", NO_SSH_HINT)
    return HostSettings(
        Address(host, login, port),
        tuple(_parse_path(one, tokens) for one in identities if not one.is_none) if identities else None,
        get("identitiesonly", "no").is_yes(),
        tuple(_parse_path(one, tokens) for one in known.split()) if known else None,
        # A pattern may also match the jump host, which must not jump through itself.
        () if any(hop.host == address.host for hop in jumps) else jumps,
        "" if proxy.is_none else _expand_tokens(proxy, tokens),
        _accepts_new(get("stricthostkeychecking", "ask")),
        frozenset(method for keyword, method in _METHODS.items() if not get(keyword, "yes").is_yes()),
        _parse_seconds(get("connecttimeout", "none")),
    )


def route(address: Address, passed: tuple[str, ...] = ()) -> tuple[Address, ...]:
    """Return the machines to log in to in order, ending with the address. Raises UsageError for a cycle."""
    if address.host in passed:
        raise UsageError(
            f"the ssh config has a loop of jump hosts through {address.host}", hint="check the ProxyJump setting"
        )
    jumps = read_settings(address).jumps
    if not jumps:
        return (address,)
    return (*route(jumps[0], (*passed, address.host)), *jumps[1:], address)


def _iter_settings(
    path: Path, folder: Path, host: str, depth: int = 0, *, is_system: bool = False
) -> Iterator[tuple[str, _Value]]:
    """Yield the settings for a host from a file and the included files, in order."""
    if depth > _DEEPEST:
        raise UsageError(
            f"Include settings are nested deeper than {_DEEPEST} levels: {path}", hint="check the Include settings"
        )
    try:
        if not path.is_file():
            return
        if not is_system:
            _check_owner(path)
        lines = read_text(path, errors="replace").split("\n")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    counts = True
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        keyword, value = _split(line, where)
        if keyword == "host":
            counts = match_patterns(shlex.split(value), host)
        elif keyword == "match":
            if value.lower() != "all":
                raise UsageError(f"{where}: `Match` requires the ssh program", hint=NO_SSH_HINT)
            counts = True
        elif not keyword or not counts:
            continue
        elif keyword == "include":
            for pattern in shlex.split(value):
                place = folder / _parse_path(_Value(pattern, where), {})
                for name in _find_files(str(place), where):
                    yield from _iter_settings(Path(name), folder, host, depth + 1)
        elif keyword in _READ:
            yield keyword, _Value(value, where)
        elif not _HARMLESS.fullmatch(keyword):
            raise UsageError(f"{where}: `{line.split()[0]}` requires the ssh program", hint=NO_SSH_HINT)


def _find_files(pattern: str, where: str) -> list[str]:
    """Return the files that match a pattern, sorted. Raises UsageError for a pattern with too many directories."""
    try:
        return sorted(glob.glob(pattern))  # noqa: PTH207 (absolute patterns)
    except RecursionError as error:
        raise UsageError(f"{where}: too many wildcards in Include") from error


def _split(line: str, where: str) -> tuple[str, str]:
    """Return a line's lower-case keyword and value, without comments. Raises UsageError if the line is invalid."""
    if "\0" in line:
        raise UsageError(f"{where}: unexpected null character")
    keyword, _, rest = re.sub(r"^(\w+)\s*[=\s]\s*", r"\1 ", line.strip()).partition(" ")
    keyword = keyword.lower()
    if not keyword or keyword.startswith("#"):
        return "", ""
    if keyword == "proxycommand":
        return keyword, rest.strip()
    try:
        words = shlex.split(rest, comments=True)
    except ValueError as error:
        raise UsageError(f"{where}: {error}", hint="check the quotes") from error
    if not words or not keyword.isalnum():
        raise UsageError(f"{where}: invalid ssh setting {line.strip()!r}")
    many = keyword in ("host", "match", "include", "userknownhostsfile")
    if not many and keyword in _READ and len(words) > 1:
        raise UsageError(f"{where}: expected a single value for {keyword}, got {rest.strip()!r}")
    return keyword, shlex.join(words) if many and keyword != "match" else " ".join(words)


def match_patterns(patterns: Iterable[str], text: str) -> bool:
    """Return whether a text matches one of OpenSSH's patterns and no pattern that begins with ``!``."""
    found = False
    for pattern in patterns:
        plain = pattern.removeprefix("!")
        if match_wildcards(plain, text):
            if plain != pattern:
                return False
            found = True
    return found


def match_wildcards(pattern: str, text: str) -> bool:
    """Return whether a text matches a pattern with ``*`` and ``?``.

    The time is at most proportional to the product of both lengths. A regular expression can take exponential time.
    """
    at = place = 0  # positions in the text and in the pattern
    star, end = -1, 0  # position of the last ``*``, and end of the text that it matches
    while at < len(text):
        char = pattern[place : place + 1]
        if char == "*":
            star, end = place, at
            place += 1
        elif char in ("?", text[at]):
            at += 1
            place += 1
        elif star >= 0:
            end += 1
            at, place = end, star + 1
        else:
            return False
    return not pattern[place:].strip("*")


def _check_owner(path: Path) -> None:
    """Raise UsageError if other users can write the file, as ssh does, because they could redirect the login."""
    found = path.stat()
    if found.st_uid not in (0, os.getuid()) or found.st_mode & 0o022:
        raise UsageError(
            f"ssh refuses {path}: it is writable by other users or owned by a different user",
            hint=f"chmod 600 {shlex.quote(str(path))}",
        )


def _expand_tokens(value: _Value, tokens: dict[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name != "%" and name not in tokens:
            raise value.make_error(f"`%{name}` in {value.text!r} requires the ssh program", NO_SSH_HINT)
        return "%" if name == "%" else tokens[name]

    if "${" in value.text:
        raise value.make_error(f"`${{...}}` in {value.text!r} requires the ssh program", NO_SSH_HINT)
    return re.sub(r"%(.|$)", replace, value.text)


def _parse_path(value: _Value, tokens: dict[str, str]) -> Path:
    try:
        return Path(_expand_tokens(value, tokens)).expanduser()
    except RuntimeError as error:  # unknown user in ~USER
        raise value.make_error(str(error)) from error


def _parse_jumps(value: _Value) -> tuple[Address, ...]:
    try:
        return () if value.is_none else tuple(parse_address(hop.strip()) for hop in value.text.split(","))
    except UsageError as error:
        raise value.make_error(error.message, error.hint) from error


def _parse_port(value: _Value) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", value.text) or not 0 < int(value.text) < 65536:
        raise value.make_error(f"invalid port {value.text!r}", "expected a number from 1 to 65535")
    return int(value.text)


def _parse_seconds(value: _Value) -> float | None:
    if value.is_none:
        return None
    if not re.fullmatch(r"[0-9]{1,6}", value.text) or not int(value.text):
        raise value.make_error(f"the time {value.text!r} requires the ssh program", "expected 1 to 999999 seconds")
    return float(value.text)


def _accepts_new(value: _Value) -> bool:
    """Return whether to pin a new host key. A changed key is always refused."""
    known = {"yes": False, "true": False, "ask": False, "accept-new": True, "no": True, "false": True, "off": True}
    if (found := known.get(value.text.lower())) is None:
        raise value.make_error(f"invalid StrictHostKeyChecking {value.text!r}")
    return found
