"""Connection of a worker to a board, reopened after failures. Also describes the board for the farm."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from hil.controller.devices.board import make_client
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import AgentEndpoint, BoardClient
from hil.controller.devices.choosing.board_resolver import open_link, read_capabilities
from hil.controller.devices.links.link import Link
from hil.controller.devices.measuring.board_stack import StackReader, list_described_parts
from hil.controller.devices.power_control.provisioned_image import read_image
from hil.controller.devices.ssh.address import is_ssh_address
from hil.controller.farm.client.lease_session import describe_lease
from hil.controller.farm.client.machine import get_machine_id
from hil.controller.farm.host.inventory import (
    MAX_PUBLIC_VERSION,
    BoardEntry,
    HostInfo,
    format_public_config,
    format_public_console,
    lease_config,
    make_meter_card,
)
from hil.controller.farm.host.place_watch import PlaceWatch
from hil.controller.farm.labgrid import LabgridPlace, borrow_place
from hil.controller.farm.messages import (
    COMMANDS_LABEL,
    MAX_FENCE,
    POWER_ACTIONS,
    SEVERAL_BOARDS_LABEL,
    STACK_LABEL,
    BoardAccess,
    BoardCard,
    Grant,
)
from hil.controller.farm.rpc import is_image_name
from hil.controller.records.lab.board_image import ProvisionedImage
from hil.core.board_config import BoardConfig
from hil.core.text import TextSink
from hil.errors import BoardBusy, BoardError, BoardLost, BoardUnreachable, HilError, SessionEnded

T = TypeVar("T")

_HOLD_SECONDS = 3.0
_HOST_LABELS = (COMMANDS_LABEL, SEVERAL_BOARDS_LABEL)
# Parts of the stack with labels of their own, and lists of devices.
_NOT_LABELS = ("kernel", "runtime", "pci", "usb")
_BROKEN = (BoardLost, BoardUnreachable, SessionEnded)


@dataclass
class BoardConnection:
    """Connection to one board."""

    post: BoardEntry
    site: HostInfo
    say: TextSink
    # Called with the reason, in another thread, when the board's labgrid place was released by others.
    on_place_lost: TextSink = lambda why: None
    config: BoardConfig = field(init=False)  # board config; includes labgrid's settings if borrowed
    info: dict[str, Any] = field(default_factory=dict)  # last Describe reply of the agent; empty if unknown

    def __post_init__(self) -> None:
        self.config = self.post.load()
        self._public = format_public_config(self.config)
        self._versions: dict[str, str] = {}
        self._held = contextlib.ExitStack()
        self._borrowed = False
        self._watch: PlaceWatch | None = None
        self._link: Link | None = None
        self._client: BoardClient | None = None
        self._is_changed = threading.Event()

    @property
    def has_sessions(self) -> bool:
        """Whether the board has sessions. Without them, multiple users may access the board at the same time."""
        return read_capabilities(BoardChoice(self.config)).sessions

    @property
    def is_borrowed(self) -> bool:
        """Whether labgrid manages the board. Only the board's owner may acquire the place."""
        return bool(self.config.labgrid.place)

    def read_card(self) -> BoardCard:
        """Return the board's description with the current data."""
        return BoardCard(
            name=self.post.name,
            site=self.site.site,
            host=self.site.host,
            labels={**collect_labels(self.config, self.info, self._versions), **self._list_host_labels()},
            config=self._public,
            hw_type=self.config.hw_type,
            fence=self.fence,
            powered=self.config.power.can("cycle"),
            power=[action for action in POWER_ACTIONS if self.config.power.can(action)],
            machine=get_machine_id(),
            access=BoardAccess(self.config.access.users, self.config.access.groups),
            provisions=bool(self.config.provision.command),
            image=self._read_image(),
            meter=make_meter_card(self.config),
            console=format_public_console(self.config),
        )

    def _read_image(self) -> ProvisionedImage | None:
        """Return the image on the board; None if unknown, or if the farm refuses its name."""
        image = read_image(self.post.name, self.config.path, str(self.info.get("board_id", "")))
        return image if image is not None and is_image_name(image.file) else None

    def mark_changed(self) -> None:
        """Read the board's description again before the next job: the board has a new system. Thread-safe."""
        self._is_changed.set()

    def _list_host_labels(self) -> dict[str, Any]:
        """Return the labels of the host's permissions, which a board's config cannot change."""
        return {label: True for label in _HOST_LABELS} if self.site.allow_commands else {}

    @property
    def target(self) -> AgentEndpoint | None:
        """Address of the agent, or None without an agent or a connection."""
        return self._link.target if self._link else None

    @property
    def fence(self) -> int:
        """Highest fence reported by the board; 0 if unknown or invalid."""
        fence = int(self.info.get("fence", 0))
        return fence if fence < MAX_FENCE else 0

    def refresh(self) -> None:
        """Connect if necessary, and read the board's description."""
        self._ensure_place()
        if not self.has_sessions:
            return
        self.info = self._call_with_reconnect(lambda: self._open_client().info())
        fence = int(self.info.get("fence", 0))
        if fence >= MAX_FENCE:
            raise BoardError(
                f"the agent has stored the invalid fence {fence}, which normal use cannot reach",
                board=self.post.name,
                hint=f"reset the fence with hil board reset-fence {self.post.name}",
            )

    def read_stack(self) -> None:
        """Run the commands of ``[stack]``, so that the card contains the versions. Call :meth:`take` first.

        Raises BoardError if the board does not respond.
        """
        commands = {name: one for name, one in self.config.stack.items() if not one.text}
        if not commands:
            return
        shell = self._link.shell if self._link else None
        reader = StackReader(self.post.name, commands, {}, shell, is_simulator=self.config.simulator is not None)
        self._versions = {one.name: one.version for one in reader.read({}) if one.name in commands}
        self._public = format_public_config(self.config, self._versions)

    def _call_with_reconnect(self, call: Callable[[], T]) -> T:
        """Call the board, and retry once on a new connection if the old one broke."""
        try:
            return call()
        except _BROKEN:
            self.close()
        try:
            return call()
        except _BROKEN:
            self.close()
            raise

    def deploy_runtime(self, runtime: str, say: TextSink) -> bool:
        """Deploy a runtime to a board, if hil deploys the board's agent over SSH. Call :meth:`take` first.

        Returns True if the agent may have been replaced.
        """
        if self._link is None:
            self.refresh()
        has = {one["name"] for one in self.info.get("runtimes", ()) if not one.get("error")}
        if not runtime or self._link is None or runtime in has or not is_ssh_address(self.config.connection.address):
            return False
        self.close()
        self._open_client(runtime, say)
        self.refresh()
        return True

    def take(self, grant: Grant) -> None:
        """Open a session with a lease's fence; :meth:`release` closes the session. Ends sessions with older fences."""

        def take() -> None:
            if self._link is None:
                self.refresh()
            purpose = f"farm job {grant.job}"
            self._open_client().open_session(
                purpose, fence=grant.fence, wait_s=_HOLD_SECONDS, on_wait=lambda text: None
            )

        self._ensure_place()
        if self._is_changed.is_set():
            self._is_changed.clear()
            self.hang_up()
        if self._link is None:
            self.refresh()
        if not self.has_sessions:
            return
        try:
            self._call_with_reconnect(take)
        except BoardBusy:
            with contextlib.suppress(HilError):
                self.refresh()
            raise

    def release(self) -> None:
        """Close the session, if any."""
        if self._client is not None:
            self._client.close_session()

    def is_held(self, fence: int) -> bool:
        """Return True if a session with this fence is open."""
        if self._link is None:
            return False
        holder = self._open_client().info().get("holder")
        return holder is not None and int(holder.get("fence", 0)) == fence

    def choice(self, grant: Grant) -> BoardChoice:
        """Return the board for a lease's job, with the lease's fence and open session."""
        address = self.target.address if self.target else ""
        config = lease_config(self.config, address, grant.fence, describe_lease(self.read_card(), grant))
        return BoardChoice(config, connect=self._hand_over if address else None)

    def _hand_over(self, board: str) -> BoardClient:
        """Hand over the client with the open session. If either no longer exists, return a new client."""
        assert self._link is not None
        client, self._client = self._client, None
        if client is not None and not client.has_session:
            client.close()
            client = None
        return client or make_client(self._link, board)

    def hang_up(self) -> None:
        """Close the link. The link is reopened on demand."""
        if self._client is not None:
            self._client.close()
        if self._link is not None:
            self._link.close()
        self._client = self._link = None

    def close(self) -> None:
        """Close the link and release the labgrid place."""
        self.hang_up()
        self._held.close()
        self._borrowed, self._watch = False, None
        self.config = self.post.load()

    def _acquire_place(self) -> None:
        if not self._borrowed:
            self.config = self._held.enter_context(borrow_place(self.config, self.site.host))
            self._borrowed = True
            if self.is_borrowed:
                place = LabgridPlace(self.config.labgrid, self.site.host, self.post.name)
                self._watch = self._held.enter_context(PlaceWatch(place, self.say, on_lost=self.on_place_lost))

    def _ensure_place(self) -> None:
        """Acquire the board's labgrid place, also if a user or a restart of the coordinator released the place."""
        self._acquire_place()
        if self._watch is not None:
            try:
                self._watch.ensure_held()
            except HilError:
                self.close()
                raise

    def _open_client(self, runtime: str = "", say: TextSink | None = None) -> BoardClient:
        if self._link is None:
            self._acquire_place()
            self._link = open_link(BoardChoice(self.config, runtime=runtime, say=say or self.say))
        if self._client is None:
            self._client = make_client(self._link, self.post.name)
        return self._client


def collect_labels(
    config: BoardConfig, info: Mapping[str, Any], versions: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return a board's labels. Labels in the config override discovered ones.

    Discovered labels:
        - ``arch``, ``cpu`` (model), ``features`` (of the CPU), ``cores``, ``mem`` (bytes)
        - ``system``, ``kernel``, ``libc``, ``agent`` (version), ``simulated``
        - ``runtimes``, a label per runtime (version), ``devices`` (of all runtimes)
        - ``agentless`` if programs are run by command
        - ``meter`` (kind)
        - a label per part of the stack, such as ``stack.driver``

    Args:
        info: Describe reply as a dict.
        versions: part of the stack -> output of its command.
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
        "agentless": not read_capabilities(BoardChoice(config)).sessions,
        "meter": config.meter.kind,
        **{name: one.get("version") for name, one in runtimes.items()},
        **_collect_stack_labels(config, info, versions),
    }
    labels = {**{key: value for key, value in found.items() if value}, **config.labels}
    return {key: value for key, value in labels.items() if key not in _HOST_LABELS}


def _collect_stack_labels(config: BoardConfig, info: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, str]:
    """Return the known parts of the stack as labels. The config's parts override those of the board."""
    found = {one.name: one.version for one in list_described_parts(info) if one.name not in _NOT_LABELS}
    found |= {name: one.text or versions.get(name, "") for name, one in config.stack.items()}
    return {f"{STACK_LABEL}{name}": version[:MAX_PUBLIC_VERSION] for name, version in found.items()}
