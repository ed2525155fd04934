"""Use boards managed by labgrid.

hil acquires the labgrid place while the farm uses the board. labgrid supplies the SSH address and power control.

In the board's config::

    [labgrid]
    place = "rpi5"
    coordinator = "lab.example:20408"

labgrid is not a Python dependency: hil runs labgrid-client, which talks to the coordinator.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hil.core.board_config import BoardConfig, Command, Labgrid
from hil.core.bounded_command import run_bounded
from hil.errors import BoardBusy, BoardError, BoardUnreachable, UsageError

Resource = Mapping[str, Any]

_CALL_SECONDS = 60.0
_SHOWN = 400
_RESOURCE = re.compile(r"(?:Acquired|Matching) resource '(?P<name>.*?)' \(.*\):")
# Error messages of labgrid-client 26, and the corresponding hil errors. labgrid-client has no separate exit codes for
# these errors.
_MEANS: tuple[tuple[str, type[BoardError | UsageError], str], ...] = (
    ("You have already acquired", BoardBusy, "this host has already acquired the place"),
    ("already acquired", BoardBusy, "show the owner of the place or resource: labgrid-client who"),
    ("acquired by a different user", BoardBusy, "the current owner can release it: labgrid-client -p PLACE release"),
    ("is not acquired", BoardBusy, "a user released the place with --kick, or the coordinator restarted"),
    ("was not reserved for", BoardBusy, "show the reservations: labgrid-client reservations"),
    ("Failed to acquire resources", BoardBusy, "a different place uses the resources: labgrid-client resources -v"),
    ("has no matching remote resource", BoardUnreachable, "check that the exporter of the place is running"),
    (
        "Could not connect to coordinator",
        BoardUnreachable,
        "check that labgrid-coordinator is running at the address in [labgrid] coordinator",
    ),
    ("matches nothing", UsageError, "list all places: labgrid-client places"),
    ("matches multiple places", UsageError, "list all places: labgrid-client places"),
)


@contextlib.contextmanager
def borrow_place(config: BoardConfig, holder: str) -> Iterator[BoardConfig]:
    """Acquire a board's labgrid place, and yield the config with labgrid's SSH address, power hooks and console.

    Values set in the config take precedence. A config without a labgrid place is yielded unchanged.

    Args:
        holder: unique name of the holder. If a killed holder of this name still has the place, the new holder takes the
            place over.

    Raises:
        UsageError: labgrid-client, the place or the ``NetworkService`` is missing.
        BoardError: another user has the place, the coordinator or exporter is unreachable, or labgrid failed.
    """
    if not config.labgrid.place:
        yield config
        return
    place = LabgridPlace(config.labgrid, holder, config.name)
    place.acquire()
    try:
        _, resources = place.show()
        connection = config.connection
        if not connection.address:
            connection = replace(connection, address=place.get_address(resources))
        hooks = {**place.make_power_hooks(resources), **config.power.hooks}
        console = config.console
        if not console.is_set:
            console = replace(console, address=place.get_console(resources, console.labgrid))
        yield replace(config, connection=connection, power=replace(config.power, hooks=hooks), console=console)
    finally:
        # The place may already be released, by a user with --kick or after the loss of the coordinator.
        with contextlib.suppress(BoardError, UsageError):
            place.release()


@dataclass(frozen=True)
class LabgridPlace:
    """Place of a labgrid coordinator, accessed with ``labgrid-client``."""

    labgrid: Labgrid
    holder: str
    board: str

    def acquire(self) -> None:
        """Acquire the place, unless this holder already has the place.

        Raises BoardBusy with the owner's name if another user has the place.
        """
        try:
            self._run_client("acquire")
        except BoardBusy as error:
            owner, _ = self.show()
            if owner == self._holder_name:
                return
            if not owner:
                raise
            raise BoardBusy(
                f"labgrid place {self.labgrid.place} is in use by {owner}",
                board=self.board,
                hint=f"the current owner can release it: labgrid-client -p {self.labgrid.place} release",
            ) from error

    def release(self) -> None:
        """Release the place."""
        self._run_client("release")

    def is_held(self) -> bool:
        """Return True if this holder still has the place.

        Any labgrid user can release the place with ``--kick``. A restarted coordinator releases all places.
        """
        return self.show()[0] == self._holder_name

    def show(self) -> tuple[str, dict[str, Resource]]:
        """Return the place's holder ("" if free) and resources by name. Raises UsageError for an unknown place."""
        lines = self._run_client("show").splitlines()
        # labgrid-client accepts a part of a name and shows a different place.
        if lines[:1] != [f"Place '{self.labgrid.place}':"]:
            raise UsageError(
                f"labgrid place {self.labgrid.place!r} not found",
                board=self.board,
                hint="list all places: labgrid-client places",
            )
        owner = next((line.partition(": ")[2] for line in lines if line.startswith("  acquired: ")), "None")
        return "" if owner == "None" else owner, _parse_resources(lines)

    def get_address(self, resources: Mapping[str, Resource]) -> str:
        """Return ``USER@HOST:PORT`` of the place's ``NetworkService``."""
        services = {name: one for name, one in resources.items() if one.get("cls") == "NetworkService"}
        named = self.labgrid.service
        if (named and named not in services) or (not named and len(services) != 1):
            has = f"has the services {', '.join(services)}" if services else "has no NetworkService"
            raise UsageError(
                f"labgrid place {self.labgrid.place} {has}",
                board=self.board,
                hint="select the service for SSH with [labgrid] service"
                if services
                else "add a NetworkService to the exporter",
            )
        service = services[named] if named else next(iter(services.values()))
        if not service.get("avail"):
            raise BoardUnreachable(f"labgrid reports that {self.labgrid.place} is unavailable", board=self.board)
        return _make_ssh_address(service.get("params", {}), self.board)

    def get_console(self, resources: Mapping[str, Resource], named: str) -> str:
        """Return the address of the place's ``NetworkSerialPort``; "" if the place has none, or several.

        Args:
            named: name of the resource in ``[console] labgrid``; "" takes the only one.

        Raises:
            UsageError: the place does not have the named resource.
        """
        ports = {name: one for name, one in resources.items() if one.get("cls") == "NetworkSerialPort"}
        if named and named not in ports:
            raise UsageError(
                f"labgrid place {self.labgrid.place} has no NetworkSerialPort {named!r}",
                board=self.board,
                hint=f"set [console] labgrid to one of {', '.join(ports)}" if ports else "add a port to the exporter",
            )
        if not named and len(ports) != 1:
            return ""
        params = (ports[named] if named else next(iter(ports.values()))).get("params", {})
        host, port = str(params.get("host") or ""), str(params.get("port") or "")
        if not host or not port:  # the exporter has not started ser2net yet
            return ""
        host = f"[{host}]" if ":" in host else host
        # labgrid's exporter serves RFC 2217, an extension of telnet, unless the protocol is raw.
        return f"{'tcp' if params.get('protocol') == 'raw' else 'telnet'}://{host}:{port}"

    def make_power_hooks(self, resources: Mapping[str, Resource]) -> dict[str, Command]:
        """Return hooks for the table ``[power]`` that call labgrid; empty if the place has no power port."""
        if not any("Power" in str(one.get("cls")) for one in resources.values()):
            return {}
        settings = [f"{name}={value}" for name, value in self._client_environment.items()]
        return {
            action: Command(("env", *settings, *self._client_command, "power", action))
            for action in ("on", "off", "cycle")
        }

    @property
    def _client_environment(self) -> dict[str, str]:
        """Environment variables for labgrid-client: host and user names, and the coordinator."""
        host, user = self._holder_name.split("/")
        where = {"LG_COORDINATOR": self.labgrid.coordinator} if self.labgrid.coordinator else {}
        return {"LG_HOSTNAME": host, "LG_USERNAME": user, **where}

    @property
    def _holder_name(self) -> str:
        return f"{_clean_name_part(socket.gethostname())}/hil-farm-{_clean_name_part(self.holder)}"

    @property
    def _client_command(self) -> list[str]:
        return [*shlex.split(self.labgrid.client), "-p", self.labgrid.place]

    def _run_client(self, action: str) -> str:
        command = [*self._client_command, action]
        try:
            done = run_bounded(command, _CALL_SECONDS, {**os.environ, **self._client_environment})
        except OSError as error:
            raise UsageError(
                f"cannot start the labgrid client: {error}",
                board=self.board,
                hint="install the client (uv tool install labgrid), or set the path: [labgrid] client = ...",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise BoardUnreachable(
                f"{shlex.join(command)} timed out after {_CALL_SECONDS:g} s", board=self.board
            ) from error
        if done.code:
            raise _parse_error(done.text, action, self.labgrid.place, self.board)
        return done.text


def _parse_error(output: str, action: str, place: str, board: str) -> BoardError | UsageError:
    for text, kind, hint in _MEANS:
        if text in output:
            line = next(one for one in output.splitlines() if text in one)
            return kind(
                f"labgrid: {line.partition('Error: ')[2] or line}", board=board, hint=hint.replace("PLACE", place)
            )
    return BoardError(f"labgrid could not {action} place {place}", board=board, detail=output[-_SHOWN:])


def _parse_resources(lines: list[str]) -> dict[str, Resource]:
    """Parse the resources in the output of ``labgrid-client show``: a name line, then an indented Python literal."""
    found: dict[str, Resource] = {}
    name, block = "", ""
    for line in [*lines, "end"]:
        if line.startswith("  "):
            block += line[2:] + "\n"
            continue
        if name:
            with contextlib.suppress(ValueError, SyntaxError):
                value = ast.literal_eval(block)
                found[name] = value if isinstance(value, dict) else {}
        head = _RESOURCE.fullmatch(line)
        name, block = head["name"] if head else "", ""
    return found


def _make_ssh_address(params: Mapping[str, Any], board: str) -> str:
    host, user, port = (str(params.get(key) or "") for key in ("address", "username", "port"))
    if not host or not user:
        raise UsageError("labgrid's NetworkService lacks an address or username", board=board)
    if params.get("extra", {}).get("proxy_required"):
        raise UsageError(
            f"labgrid reaches {host} only through the proxy {params['extra'].get('proxy')}",
            board=board,
            hint="set ProxyJump in the SSH config and [connection] address, or run the farm host on the proxy",
        )
    host = f"[{host}]" if ":" in host else host
    return f"{user}@{host}:{port}" if port else f"{user}@{host}"


def _clean_name_part(text: str) -> str:
    """Replace characters that labgrid does not allow in a name part. labgrid splits names at slashes."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-") or "host"
