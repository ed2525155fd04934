"""Locate a farm: home directory on this machine, gateway address and token."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hil.controller.farm.oidc.login_store import LoginStore
from hil.core.files import read_file, read_text
from hil.errors import UsageError
from hil.protocol.listening import check_token_transport, parse_host_port
from hil.protocol.versions import make_farm_metadata

HOME_VARIABLE, FARM_VARIABLE, TOKEN_VARIABLE, CA_VARIABLE = "HIL_FARM_HOME", "HIL_FARM", "HIL_FARM_TOKEN", "HIL_FARM_CA"
DB_VARIABLE = "HIL_FARM_DB"
# Status file of the farm process (pid, address, readiness). It exists while the process runs.
SHEET = "up.json"


def get_farm_home() -> Path:
    """Return the home directory of this machine's farm.

    The default is ``hil/farm`` in the user's data directory. ``HIL_FARM_HOME`` overrides the default.
    """
    if given := os.environ.get(HOME_VARIABLE):
        return Path(given).absolute()
    import platformdirs

    return Path(platformdirs.user_data_dir("hil")) / "farm"


@dataclass(frozen=True)
class FarmAddress:
    """Addresses and credentials of a farm's gateways."""

    gateways: tuple[str, ...]  # interchangeable addresses: ``unix:PATH`` or ``HOST:PORT``
    token: str
    # PEM file of the CA that signed the gateways' certificates. None disables TLS, which only Unix sockets and loopback
    # addresses allow.
    ca: Path | None = None
    # Returns the current token of a stored login, which changes; None for a constant token.
    token_source: Callable[[], str] | None = field(default=None, compare=False, repr=False)

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """gRPC metadata for every call: token and hil version."""
        token = self.token_source() if self.token_source else self.token
        return [("authorization", f"Bearer {token}"), make_farm_metadata()]


def choose_farm_address(gateway: str = "", token: str = "", ca: Path | None = None) -> FarmAddress:
    """Return the address of the selected farm.

    Arguments override ``HIL_FARM``, ``HIL_FARM_TOKEN`` and ``HIL_FARM_CA``. The default is this
    machine's farm, with the token from its home. The token is only sent to the farm's Unix socket.

    Raises:
        UsageError: no farm is selected, and no farm runs here; the local farm belongs to another user; the token is
            missing; or :func:`check_address` refuses an address.
    """
    named = gateway or os.environ.get(FARM_VARIABLE, "")
    home = get_farm_home()
    token = token or os.environ.get(TOKEN_VARIABLE, "")
    ca = ca or (Path(os.environ[CA_VARIABLE]) if os.environ.get(CA_VARIABLE) else None)
    if not named:
        named = f"unix:{get_socket_path(home)}"
        if not is_there(get_socket_path(home)) and not is_up(home):
            raise UsageError(
                f"no farm is running on this machine, and {FARM_VARIABLE} is not set",
                hint=f"run hil farm up, or set {FARM_VARIABLE}=HOST:PORT",
            )
    gateways = tuple(part.strip() for part in named.split(",") if part.strip())
    source = None if token else _find_login(named)
    if source is None:
        token = token or _read_own_token(home, gateways)
    for gateway in gateways:
        check_address(gateway, ca)
    return FarmAddress(gateways, source() if source else token, ca, source)


def get_login_key() -> str:
    """Return the farm of a stored login: the value of ``HIL_FARM``. Raises UsageError if it is not set."""
    if not (named := os.environ.get(FARM_VARIABLE, "")):
        raise UsageError(f"{FARM_VARIABLE} is not set", hint=f"set {FARM_VARIABLE}=HOST:PORT to the farm's address")
    return named


def open_login_store() -> LoginStore:
    """Return the file with this user's logins, in the user's data directory."""
    import platformdirs

    return LoginStore(Path(platformdirs.user_data_dir("hil")) / "farm-logins.json")


def _find_login(farm: str) -> Callable[[], str] | None:
    """Return a function for the token of a stored login, or None if there is no login at this farm."""
    store = open_login_store()
    return partial(store.get_token, farm) if store.find(farm) is not None else None


def check_address(gateway: str, ca: Path | None) -> None:
    """Raise UsageError if the address is invalid, or if tokens would be sent unencrypted to another machine."""
    if not gateway.startswith("unix:"):
        parse_host_port(gateway, what="gateway address")
    hint = "set HIL_FARM_CA to the PEM file of the CA that signed the gateway's certificate"
    check_token_transport(gateway, encrypted=ca is not None, hint=hint)


def own_address() -> FarmAddress:
    """Return the address of this machine's farm and ignore the environment.

    Raises UsageError if the farm does not run.
    """
    home = get_farm_home()
    gateway = f"unix:{get_socket_path(home)}"
    if not is_there(get_socket_path(home)):
        raise UsageError(f"no farm is running in {home}", hint="start the farm with hil farm up")
    return FarmAddress((gateway,), _read_own_token(home, [gateway]))


def _read_own_token(home: Path, gateways: Sequence[str]) -> str:
    """Return the token of this machine's farm, but only for the farm's Unix socket, which no other user can serve."""
    hint = f"set {TOKEN_VARIABLE}; an admin creates tokens with hil farm token add. Or run hil farm login"
    if any(gateway != f"unix:{get_socket_path(home)}" for gateway in gateways):
        raise UsageError(f"the farm at {', '.join(gateways)} requires a token", hint=hint)
    try:
        return read_text(get_token_file(home)).strip()
    except OSError as error:
        raise UsageError("the farm requires a token", hint=hint) from error


def is_there(file: Path) -> bool:
    """Return True if a file of a farm's home exists. Raises UsageError if another user owns the home."""
    try:
        file.stat()
    except PermissionError as error:
        raise UsageError(
            f"the farm in {file.parent} belongs to a different user",
            hint=f"use the farm with {FARM_VARIABLE}=HOST:PORT and {TOKEN_VARIABLE}; only the owner can stop the farm",
        ) from error
    except OSError:
        return False
    return True


def read_sheet(home: Path) -> dict[str, Any] | None:
    """Return the status file of a home's farm process, or None if it is missing or invalid."""
    try:
        found: dict[str, Any] = json.loads(read_file(home / SHEET))
        return found
    except (OSError, ValueError):
        return None


def is_up(home: Path) -> bool:
    """Return True if the farm process of a home is alive. The farm process restarts a dead gateway."""
    with contextlib.suppress(OSError, TypeError, ValueError, LookupError, OverflowError):
        os.kill(int((read_sheet(home) or {})["pid"]), 0)
        return True
    return False


def may_return(address: FarmAddress) -> bool:
    """Return True if an unreachable gateway may come back. For a local gateway, the farm process must be alive."""
    home = get_farm_home()
    own = f"unix:{get_socket_path(home)}"
    return any(gateway != own for gateway in address.gateways) or is_up(home)


def get_socket_path(home: Path) -> Path:
    """Return the path of the gateway's Unix socket."""
    return home / "gateway.sock"


def get_token_file(home: Path) -> Path:
    """Return the path of the admin token of the user who runs the farm."""
    return home / "token"
