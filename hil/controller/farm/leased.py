"""A lease in words: how one is ordered, what is granted, and the leased board as a board config."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

import tomlkit
from tomlkit.exceptions import TOMLKitError

from hil.controller.farm.words import BoardCard, Grant, Kind, Order, Priority, Spec
from hil.errors import FarmError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# As others see it.
_LONGEST_PURPOSE = 200
# A lease that no other time is told for lasts as long as whoever has it beats, but a day at most.
MOST_S = 86400.0


def lease_order(
    selector: str,
    purpose: str,
    *,
    for_s: float = MOST_S,
    priority: Priority = Priority.NORMAL,
    project: str = "",
) -> Order:
    """The order of a lease.

    Args:
        selector: what the board must be; "" is any.
        purpose: what for, as others see it.
        for_s: for how long at most.
        priority: class.
        project: whom it is counted for, beside the user; "" is the token's.
    """
    purpose = purpose[:_LONGEST_PURPOSE]
    spec, title = Spec(Kind.LEASE, {"purpose": purpose}), purpose or "lease"
    return Order(title, (spec,), selector=selector, timeout_s=for_s, priority=priority, project=project)


@dataclass(frozen=True)
class Held:
    """What was granted.

    Attributes:
        grant: the lease.
        card: the board.
        key: shows that the lease is ours.
    """

    grant: Grant
    card: BoardCard
    key: str


def leased_config(card: BoardCard, grant: Grant, address: str) -> str:
    """The board config, as TOML, of a board that is leased.

    Args:
        card: the board's.
        grant: the lease.
        address: the agent's, for whoever reads the config.

    Raises:
        FarmError: the card's own config cannot be read.
    """
    try:
        config = tomlkit.parse(card.config)
    except TOMLKitError as error:
        raise FarmError(f"the config that the farm has of {card.name} cannot be read: {error}") from error
    own = config.get("board", {})
    board = {key: own[key] for key in ("description", "runtime") if key in own}
    board |= {"name": card.name, "hw_type": card.hw_type or own.get("hw_type", card.name)}
    # Only its host can switch its power or reach it otherwise.
    for table in ("connection", "power", "labgrid"):
        config.pop(table, None)
    config["board"] = board
    config["connection"] = {"address": address, "fence": grant.fence, "lease": lease_text(card, grant)}
    return tomlkit.dumps(config)


def lease_text(card: BoardCard, grant: Grant) -> str:
    """Which lease it is, for results: ``job 17, lease 5, lab1-host at lab1``."""
    place = " at ".join(part for part in (card.host, card.site) if part)
    return ", ".join(part for part in (f"job {grant.job}", f"lease {grant.lease}", place) if part)


def machine_id() -> str:
    """What tells this machine, since it was booted, from any other one."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"{uuid.getnode():012x}"
