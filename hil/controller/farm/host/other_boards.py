"""Other boards of a job with several boards: wait for their hosts, and write their configs.

The command runs on the host of the first board. The other boards may be on other machines, so the command uses them
through the farm, as the holder of a lease does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hil.controller.farm.client.client import FarmClient, FarmTunnel
from hil.controller.farm.client.lease_session import make_leased_config
from hil.controller.farm.host.inventory import HostInfo, get_guard_path
from hil.controller.farm.messages import Grant, GrantedLease
from hil.controller.farm.rpc import LEASE_KEY, LEASE_SECRET_KEY
from hil.core.text import TextSink
from hil.errors import BoardLost
from hil.protocol.v1 import farm_pb2 as pb

# Time for the other hosts to prepare their boards, for example to install a runtime.
_READY_SECONDS = 300.0
_LOOK_SECONDS = 0.3


@contextlib.contextmanager
def serve_other_boards(
    grant: Grant, folder: Path, site: HostInfo, farm: Callable[[], FarmClient], tell: TextSink
) -> Iterator[tuple[Path, ...]]:
    """Yield the config files of a job's boards after the first, in order.

    Args:
        folder: directory for the files.

    Raises:
        BoardLost: a board is not ready in time.
    """
    if not grant.more:
        yield ()
        return
    _wait_for_boards(grant, farm(), tell)
    with contextlib.ExitStack() as stack:
        configs = []
        for number, lease in enumerate(grant.more, 2):
            config = folder / f"{number}-{make_file_name(lease.card.name)}.toml"
            address = _open_address(lease, site, farm, stack)
            # A command has no token for the farm, so it cannot read the consoles of other hosts.
            config.write_text(make_leased_config(lease.card, lease.grant, address, has_console=False))
            configs.append(config)
        yield tuple(configs)


def make_file_name(board: str) -> str:
    """Return the name of a board without colons, which separate the paths in HIL_BOARDS."""
    return board.replace(":", "_")


def _open_address(
    lease: GrantedLease, site: HostInfo, farm: Callable[[], FarmClient], stack: contextlib.ExitStack
) -> str:
    """Return the address of a board's agent: direct for a board of this host, otherwise a tunnel through the farm."""
    if lease.card.host == site.host:
        return f"unix:{get_guard_path(site, lease.grant.lease)}"
    tunnel = FarmTunnel(partial(_dial_agent, farm, lease))
    stack.callback(tunnel.close)
    return tunnel.address


def _dial_agent(farm: Callable[[], FarmClient], lease: GrantedLease, pieces: Iterator[pb.Piece]) -> Any:
    client = farm()
    keys = [(LEASE_KEY, str(lease.grant.lease)), (LEASE_SECRET_KEY, lease.key)]
    return client.stub.Dial(pieces, metadata=[*client.metadata, *keys])


def _wait_for_boards(grant: Grant, farm: FarmClient, tell: TextSink) -> None:
    """Wait until the hosts of all other boards have opened their sessions."""
    names = ", ".join(one.card.name for one in grant.more)
    tell(f"waiting for the other boards: {names}")
    wanted = {one.grant.lease: one.card.name for one in grant.more}
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        attempts = farm.ask("job", name=grant.job).attempts_made
        for attempt in attempts:
            if attempt.started_at is not None:
                wanted.pop(attempt.lease, None)
        if not wanted:
            return
        if time.monotonic() > deadline:
            board = next(iter(wanted.values()))
            raise BoardLost(f"{board} is not ready after {_READY_SECONDS:g} s", board=board)
        time.sleep(_LOOK_SECONDS)
