"""Where a farm's things are: its home on this machine, and the gateway that commands talk to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hil.errors import UsageError
from hil.protocol.listening import check_token_way, host_port

HOME_VARIABLE, FARM_VARIABLE, TOKEN_VARIABLE, CA_VARIABLE = "HIL_FARM_HOME", "HIL_FARM", "HIL_FARM_TOKEN", "HIL_FARM_CA"
DB_VARIABLE = "HIL_FARM_DB"


def farm_home() -> Path:
    """The folder of this machine's own farm: ``HIL_FARM_HOME``, else ``hil/farm`` in the user's data folder."""
    if given := os.environ.get(HOME_VARIABLE):
        return Path(given).absolute()
    import platformdirs

    return Path(platformdirs.user_data_dir("hil")) / "farm"


@dataclass(frozen=True)
class FarmAddress:
    """How a gateway is reached."""

    gateways: tuple[str, ...]  # addresses (``unix:PATH``, ``HOST:PORT``), of which any will do
    token: str
    # PEM file of the authority that signed the gateways' certificates; None is no TLS, for Unix sockets and loopback
    # alone.
    ca: Path | None = None

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """What each call says of who makes it."""
        return [("authorization", f"Bearer {self.token}")]


def farm_address(gateway: str = "", token: str = "", ca: Path | None = None) -> FarmAddress:
    """The farm that is meant: what is given, else ``HIL_FARM``, ``HIL_FARM_TOKEN``, ``HIL_FARM_CA``, else this
    machine's own: its socket with the token in its home, which is sent nowhere else.

    Raises:
        UsageError: there is no farm here and none is named, or it is another user's, or no token; or a gateway
            cannot be called so (see check_way).
    """
    named = gateway or os.environ.get(FARM_VARIABLE, "")
    home = farm_home()
    token = token or os.environ.get(TOKEN_VARIABLE, "")
    ca = ca or (Path(os.environ[CA_VARIABLE]) if os.environ.get(CA_VARIABLE) else None)
    if not named:
        named = f"unix:{socket_of(home)}"
        if not is_there(socket_of(home)):
            raise UsageError(
                "no farm runs here and none is named", hint=f"hil farm up, or set {FARM_VARIABLE}=HOST:PORT"
            )
    gateways = tuple(part.strip() for part in named.split(",") if part.strip())
    token = token or _own_token(home, gateways)
    for gateway in gateways:
        check_way(gateway, ca)
    return FarmAddress(gateways, token, ca)


def check_way(gateway: str, ca: Path | None) -> None:
    """Raise UsageError for what is no address, or where tokens would go to another machine in the clear."""
    if not gateway.startswith("unix:"):
        host_port(gateway, what="gateway's address")
    hint = "HIL_FARM_CA names the PEM file of the authority that signed the gateway's certificate"
    check_token_way(gateway, encrypted=ca is not None, hint=hint)


def own_address() -> FarmAddress:
    """This machine's own farm, whatever the environment names; UsageError where none runs here."""
    home = farm_home()
    gateway = f"unix:{socket_of(home)}"
    if not is_there(socket_of(home)):
        raise UsageError(f"no farm runs in {home}", hint="hil farm up")
    return FarmAddress((gateway,), _own_token(home, [gateway]))


def _own_token(home: Path, gateways: Sequence[str]) -> str:
    """The token of this machine's own farm, for its own socket alone: no other user can serve that."""
    hint = f"set {TOKEN_VARIABLE}; an admin makes one: hil farm token add"
    if any(gateway != f"unix:{socket_of(home)}" for gateway in gateways):
        raise UsageError(f"the farm at {', '.join(gateways)} asks for a token of its own", hint=hint)
    try:
        return token_file(home).read_text().strip()
    except OSError as error:
        raise UsageError("the farm asks for a token", hint=hint) from error


def is_there(file: Path) -> bool:
    """Whether a file of a farm's home is there; UsageError where the home is another user's, and we may not look."""
    try:
        file.stat()
    except PermissionError as error:
        raise UsageError(
            f"the farm of {file.parent} is another user's",
            hint=f"with {FARM_VARIABLE}=HOST:PORT and a token in {TOKEN_VARIABLE} it can be used; only they can end it",
        ) from error
    except OSError:
        return False
    return True


def socket_of(home: Path) -> Path:
    """The gateway's Unix socket."""
    return home / "gateway.sock"


def token_file(home: Path) -> Path:
    """The token of whoever runs the farm: an admin's."""
    return home / "token"
