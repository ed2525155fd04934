"""Logins of this user in a private file, by farm. Tokens are refreshed before their end."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
from msgspec import convert

from hil.controller.farm.oidc.provider import make_rejection, post_form
from hil.controller.records.base import Record
from hil.core.bounded_json import parse_json
from hil.core.files import read_file, write_atomic
from hil.errors import FarmUnreachable, HilError, UsageError

_MAX_FILE = 1 << 20
# Refresh a token this many seconds before its end.
_EARLY_SECONDS = 60.0
_LOCK_SECONDS = 30.0
_HINT = "log in again: hil farm login"


class StoredLogin(Record, kw_only=True):
    """Login at a farm."""

    issuer: str
    client_id: str
    token_endpoint: str
    token: str  # token for the farm
    expires_at: float  # end of the token in seconds since the epoch; 0 if unknown
    refresh_token: str = ""
    uses_id_token: bool = False  # True if the farm gets the ID token instead of the access token

    @property
    def is_expiring(self) -> bool:
        """Whether the token ends soon or has ended."""
        return bool(self.expires_at) and time.time() > self.expires_at - _EARLY_SECONDS


class LoginStore:
    """File with logins. Only its user can read it. Thread-safe, and safe for multiple processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def find(self, farm: str) -> StoredLogin | None:
        """Return the login at a farm, or None. Raises UsageError if the file is unreadable, or readable by others."""
        entry = self._read().get(farm)
        return None if entry is None else self._convert(entry)

    def save(self, farm: str, login: StoredLogin) -> None:
        """Store a login, and replace the previous login at this farm."""
        self._change(lambda logins: logins.__setitem__(farm, login.to_json()))

    def remove(self, farm: str) -> bool:
        """Remove the login at a farm. Returns False if there was none."""
        found = self.find(farm) is not None
        self._change(lambda logins: logins.pop(farm, None))
        return found

    def get_token(self, farm: str) -> str:
        """Return a valid token for a farm. Refreshes a token that ends soon.

        Raises:
            UsageError: there is no login, or the token has ended and cannot be refreshed.
            FarmUnreachable: the token has ended and the provider does not respond.
        """
        with self._lock:
            login = self.find(farm)
            if login is None:
                raise UsageError(f"no login at the farm {farm}", hint=_HINT)
            if not login.is_expiring:
                return login.token
            if not login.refresh_token:
                if time.time() < login.expires_at:
                    return login.token
                raise UsageError(f"the login at the farm {farm} has expired", hint=_HINT)
            with self._hold_file_lock():
                login = self.find(farm) or login  # another process may have refreshed it
                return self._refresh(farm, login) if login.is_expiring else login.token

    def _refresh(self, farm: str, login: StoredLogin) -> str:
        values = {"grant_type": "refresh_token", "refresh_token": login.refresh_token, "client_id": login.client_id}
        try:
            status, answer = post_form(login.token_endpoint, values)
            if status != 200:
                raise make_rejection(status, answer)
            renewed = make_login(login, answer)
        except HilError as error:
            if time.time() < login.expires_at:
                return login.token
            error.hint = _HINT if isinstance(error, UsageError) else error.hint
            raise
        self._write({**self._read(), farm: renewed.to_json()})
        return renewed.token

    def _change(self, change: Callable[[dict[str, Any]], object]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._hold_file_lock():
            logins = self._read()
            change(logins)
            self._write(logins)

    @contextlib.contextmanager
    def _hold_file_lock(self) -> Iterator[None]:
        lock = filelock.FileLock(f"{self.path}.lock", timeout=_LOCK_SECONDS, mode=0o600)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise FarmUnreachable(
                f"another hil process has used {self.path} for {_LOCK_SECONDS:g} s", hint="retry later"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def _read(self) -> dict[str, Any]:
        try:
            state = self.path.stat()
            if state.st_uid != os.getuid() or state.st_mode & 0o077:
                raise UsageError(f"{self.path} is readable by other users", hint=f"chmod 600 {self.path}")
            document = parse_json(read_file(self.path, _MAX_FILE))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{self.path} cannot be read: {error}", hint="remove the file, then hil farm login"
            ) from error
        logins = document.get("logins") if isinstance(document, dict) else None
        return dict(logins) if isinstance(logins, dict) else {}

    def _write(self, logins: dict[str, Any]) -> None:
        write_atomic(self.path, json.dumps({"logins": logins}).encode(), mode=0o600)

    def _convert(self, entry: Any) -> StoredLogin:
        try:
            return convert(entry, StoredLogin)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{self.path} is invalid: {error}", hint="remove the file, then hil farm login") from error


def make_login(before: StoredLogin, answer: dict[str, Any]) -> StoredLogin:
    """Return a login with the tokens of a provider's response. Raises UsageError if the response has no token."""
    name = "id_token" if before.uses_id_token else "access_token"
    token, expires_in = answer.get(name), answer.get("expires_in", 0)
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise UsageError(f"the login provider sent no {name}", hint="add the scope openid to the client's settings")
    is_number = isinstance(expires_in, (int, float)) and not isinstance(expires_in, bool) and 0 < expires_in < 1e9
    refresh = answer.get("refresh_token", before.refresh_token)
    return before.replace(
        token=token,
        expires_at=time.time() + expires_in if is_number else 0.0,
        refresh_token=refresh if isinstance(refresh, str) else "",
    )
