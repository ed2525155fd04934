"""A worker's way to its board: opened once and kept, mended when it broke; and the board as the farm is shown it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import Target
from hil.controller.devices.board_resolver import open_link
from hil.controller.devices.client import AgentClient
from hil.controller.devices.links.link import Link
from hil.controller.devices.power import recover, switch
from hil.controller.devices.ssh.address import is_ssh_address
from hil.controller.farm.host.inventory import BoardEntry, HostInfo, lease_config, public_text
from hil.controller.farm.labgrid import borrowed
from hil.controller.farm.lease_session import describe_lease, machine_id
from hil.controller.farm.messages import MOST_FENCE, BoardCard, Grant
from hil.core.board_config import BoardConfig
from hil.core.text import TextSink
from hil.errors import BoardBusy, BoardError, BoardLost, BoardUnreachable, HilError, SessionEnded

T = TypeVar("T")

_HOLD_S = 3.0
_BROKEN = (BoardLost, BoardUnreachable, SessionEnded)


@dataclass
class BoardConnection:
    """The way to one board."""

    post: BoardEntry
    site: HostInfo
    say: TextSink
    config: BoardConfig = field(init=False)  # the board's; with what labgrid has of it, where it is labgrid's
    info: dict[str, Any] = field(default_factory=dict)  # what its agent said last; empty while nothing is known

    def __post_init__(self) -> None:
        self.config = self.post.load()
        self._public = public_text(self.config)
        self._held = contextlib.ExitStack()
        self._borrowed = False
        self._link: Link | None = None
        self._client: AgentClient | None = None

    @property
    def agentless(self) -> bool:
        """Whether programs are run there by command: nothing keeps others from the board then."""
        return self.config.command.kind == "command"

    @property
    def is_borrowed(self) -> bool:
        """Whether the board is labgrid's, which only whoever owns it here may hold."""
        return bool(self.config.labgrid.place)

    def card(self) -> BoardCard:
        """The board as it is known now."""
        return BoardCard(
            name=self.post.name,
            site=self.site.site,
            host=self.site.host,
            labels=labels_of(self.config, self.info),
            config=self._public,
            hw_type=self.config.hw_type,
            fence=self.fence,
            powered=self.config.power.can("cycle"),
            machine=machine_id(),
        )

    @property
    def target(self) -> Target | None:
        """Where the agent is reached from here; None where there is none, or no way to it."""
        return self._link.target if self._link else None

    @property
    def fence(self) -> int:
        """The highest that the board has seen, as far as it was asked; one that makes no sense is not told."""
        fence = int(self.info.get("fence", 0))
        return fence if fence < MOST_FENCE else 0

    def look(self) -> None:
        """Find out how the board is, opening the way to it where that is not done."""
        if self.agentless:
            self._borrow()
            return
        seen = self._mending(lambda: self._open().describe())
        self.info = MessageToDict(seen, preserving_proto_field_name=True)
        fence = int(self.info.get("fence", 0))
        if fence >= MOST_FENCE:
            raise BoardError(
                f"its agent has kept the fence {fence}, to which no board comes by being used",
                board=self.post.name,
                hint=f"hil board reset-fence {self.post.name} mends it",
            )

    def _mending(self, call: Callable[[], T]) -> T:
        """What a call to the board returns; a way that broke is opened anew, once."""
        try:
            return call()
        except _BROKEN:
            self.close()
        try:
            return call()
        except _BROKEN:
            self.close()
            raise

    def revive(self, failures: int, say: TextSink) -> None:
        """Have the board answer: its power is cycled first if checks failed before, and when it stays silent."""
        power = self.config.power
        if failures and power.can("cycle"):
            say("its last check failed: power cycle")
            switch(power, "cycle", board=self.post.name)
            self.hang_up()
        recover(self.look, power, board=self.post.name, say=say)

    def bring(self, runtime: str, say: TextSink) -> bool:
        """See to it that the board's agent has a runtime, where we put agents on it: over SSH. To be called when the
        board is ours; whether its agent may be another one now.
        """
        if self._link is None:
            self.look()
        has = {one["name"] for one in self.info.get("runtimes", ()) if not one.get("error")}
        if not runtime or self._link is None or runtime in has or not is_ssh_address(self.config.connection.address):
            return False
        self.close()
        self._open(runtime, say)
        self.look()
        return True

    def take(self, grant: Grant) -> None:
        """Take the board with a lease's fence, until :meth:`release`: nobody has it by an older one from now on."""

        def take() -> None:
            if self._link is None:
                self.look()
            purpose = f"farm job {grant.job}"
            self._open().open_session(purpose, fence=grant.fence, wait_s=_HOLD_S, on_wait=lambda text: None)

        if self._link is None:
            self.look()
        if self.agentless:
            return
        try:
            self._mending(take)
        except BoardBusy:
            with contextlib.suppress(HilError):
                self.look()
            raise

    def release(self) -> None:
        """Give the board back, where we have it."""
        if self._client is not None:
            self._client.close_session()

    def is_held(self, fence: int) -> bool:
        """Whether somebody has the board by this fence."""
        if self._link is None:
            return False
        seen = self._open().describe()
        return seen.HasField("holder") and seen.holder.fence == fence

    def choice(self, grant: Grant) -> BoardChoice:
        """The board for a lease's job, by the lease's fence, and in the session that took it."""
        address = self.target.address if self.target else ""
        config = lease_config(self.config, address, grant.fence, describe_lease(self.card(), grant))
        return BoardChoice(config, connect=self._hand_over if address else None)

    def _hand_over(self, board: str) -> AgentClient:
        """Give the client away, with the session that took the board; a new one where either is gone already."""
        assert self._link is not None
        client, self._client = self._client, None
        if client is not None and not client.has_session:
            client.close()
            client = None
        return client or AgentClient(self._link.target, board)

    def hang_up(self) -> None:
        """End the link; it is opened again when it is needed."""
        if self._client is not None:
            self._client.close()
        if self._link is not None:
            self._link.close()
        self._client = self._link = None

    def close(self) -> None:
        """Give up the way, and the board where labgrid has it."""
        self.hang_up()
        self._held.close()
        self._borrowed = False
        self.config = self.post.load()

    def _borrow(self) -> None:
        if not self._borrowed:
            self.config = self._held.enter_context(borrowed(self.config, self.site.host))
            self._borrowed = True

    def _open(self, runtime: str = "", say: TextSink | None = None) -> AgentClient:
        if self._link is None:
            self._borrow()
            self._link = open_link(BoardChoice(self.config, runtime=runtime, say=say or self.say))
        if self._client is None:
            self._client = AgentClient(self._link.target, self.post.name)
        return self._client


def labels_of(config: BoardConfig, info: Mapping[str, Any]) -> dict[str, Any]:
    """A board's labels; those of its config go before what was found out.

    ``arch``, ``cpu`` (its model), ``features`` (of the CPU), ``cores``, ``mem`` (bytes), ``system``, ``kernel``,
    ``libc``, ``runtimes``, the version of each runtime under its name, ``devices`` (of all of them), ``agent`` (its
    version), ``simulated``, and ``agentless`` where programs are run by command. ``info`` is what Describe said.
    """
    machine = info.get("machine", {})
    runtimes = {one["name"]: one for one in info.get("runtimes", ()) if not one.get("error")}
    found = {
        "arch": machine.get("arch"),
        "cpu": machine.get("cpu_model"),
        "features": machine.get("cpu_features"),
        "cores": machine.get("cores"),
        "mem": int(info.get("memory_limit_bytes", 0)) or int(machine.get("memory_bytes", 0)),
        "system": machine.get("system"),
        "kernel": machine.get("kernel"),
        "libc": machine.get("libc"),
        "runtimes": sorted(runtimes),
        "devices": sorted({device for one in runtimes.values() for device in one.get("devices", ())}),
        "agent": info.get("agent_version"),
        "simulated": bool(info.get("simulated")) or config.simulator is not None,
        "agentless": config.command.kind == "command",
        **{name: one.get("version") for name, one in runtimes.items()},
    }
    return {**{key: value for key, value in found.items() if value}, **config.labels}
