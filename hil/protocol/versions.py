"""Check the compatibility of hil releases by protocol number. See docs/versions.md."""

from __future__ import annotations

import re

from hil.core import own_version
from hil.errors import VersionMismatch
from hil.protocol.wire import PROTOCOL

# Protocol between a farm's gateways, hosts and users. Increment it for a change that older releases cannot serve.
FARM_PROTOCOL = 1
# Metadata key of calls to a gateway. The value contains the caller's protocol and release: "1 0.1.0".
FARM_KEY = "hil-farm-version"
# Assumed version of a caller without the key.
_FIRST = "1 unknown"
_VALUE = re.compile(r"(?P<protocol>[0-9]{1,6}) (?P<release>[!-~]{1,40})")
_HINT = "install the same release of hil on both sides"


def check_agent(protocol: int, release: str, board: str) -> None:
    """Raise VersionMismatch for an agent with a different protocol."""
    if protocol != PROTOCOL:
        raise VersionMismatch(
            f"the agent is hil {release[:40] or 'of an unknown release'} (agent protocol {protocol}), "
            f"but this is hil {own_version()} (agent protocol {PROTOCOL})",
            board=board,
            hint=_HINT,
        )


def make_farm_metadata() -> tuple[str, str]:
    """Return the metadata with the caller's version, for calls to a gateway."""
    return FARM_KEY, f"{FARM_PROTOCOL} {own_version()}"


def check_farm_caller(value: str) -> None:
    """Raise VersionMismatch if a client of the gateway uses a different farm protocol.

    Args:
        value: the client's metadata :data:`FARM_KEY`, "" if missing.
    """
    found = _VALUE.fullmatch(value or _FIRST)
    protocol, release = (int(found["protocol"]), found["release"]) if found else (0, "unknown")
    if protocol != FARM_PROTOCOL:
        raise VersionMismatch(
            f"the caller is hil {release} (farm protocol {protocol}), "
            f"but the gateway is hil {own_version()} (farm protocol {FARM_PROTOCOL})",
            hint=_HINT,
        )
