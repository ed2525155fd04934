"""Boards that labgrid has: a place is acquired while the farm has the board, and gives its SSH address and its power.

In the board's config::

    [labgrid]
    place = "rpi5"
    coordinator = "lab.example:20408"

labgrid itself is no dependency: its command line is called, and does the talking with the coordinator.
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
from hil.errors import BoardBusy, BoardError, BoardUnreachable, UsageError

Resource = Mapping[str, Any]

_CALL_S = 60.0
_SHOWN = 400
_RESOURCE = re.compile(r"(?:Acquired|Matching) resource '(?P<name>.*?)' \(.*\):")
# What labgrid-client 26 says, and what it means. It has no exit codes of its own for them.
_MEANS: tuple[tuple[str, type[BoardError | UsageError], str], ...] = (
    ("You have already acquired", BoardBusy, "labgrid has it for this host already"),
    ("is already acquired by", BoardBusy, "whoever has it releases it: labgrid-client -p PLACE release"),
    ("acquired by a different user", BoardBusy, "whoever has it releases it: labgrid-client -p PLACE release"),
    ("is not acquired", BoardBusy, "somebody released it with --kick, or the coordinator forgot it"),
    ("has no matching remote resource", BoardUnreachable, "does the exporter of the place run?"),
    (
        "Could not connect to coordinator",
        BoardUnreachable,
        "does labgrid-coordinator run there? see [labgrid] coordinator",
    ),
    ("matches nothing", UsageError, "labgrid-client places lists those that there are"),
    ("matches multiple places", UsageError, "labgrid-client places lists those that there are"),
)


@contextlib.contextmanager
def borrowed(config: BoardConfig, holder: str) -> Iterator[BoardConfig]:
    """A board's config while its labgrid place is ours: with the SSH address and the power that labgrid has for it.

    What the config says itself stays. One of a board that is no labgrid place is given back as it is.

    Args:
        holder: a name that no other one has; a place that it has already (it was killed) is taken over.

    Raises:
        UsageError: labgrid's command line, the place or its ``NetworkService`` is not there.
        BoardError: somebody else has the place, the coordinator or the exporter does not answer, or labgrid refused.
    """
    if not config.labgrid.place:
        yield config
        return
    place = Place(config.labgrid, holder, config.name)
    place.acquire()
    try:
        _, resources = place.show()
        connection = config.connection
        if not connection.address:
            connection = replace(connection, address=place.address(resources))
        hooks = {**place.power(resources), **config.power.hooks}
        yield replace(config, connection=connection, power=replace(config.power, hooks=hooks))
    finally:
        # Whoever kicked us out, or a coordinator that is gone, has released it.
        with contextlib.suppress(BoardError, UsageError):
            place.release()


@dataclass(frozen=True)
class Place:
    """A place of a labgrid coordinator, through ``labgrid-client``."""

    labgrid: Labgrid
    holder: str
    board: str

    def acquire(self) -> None:
        """Take it, unless it is ours already; BoardBusy where somebody else has it."""
        try:
            self._call("acquire")
        except BoardBusy:
            if not self.held():
                raise

    def release(self) -> None:
        """Give it back."""
        self._call("release")

    def held(self) -> bool:
        """Whether it is still ours: an admin of labgrid may take a place from anybody."""
        return self.show()[0] == self._me

    def show(self) -> tuple[str, dict[str, Resource]]:
        """Who has the place ("" for nobody), and its resources by name; UsageError where there is no such place."""
        lines = self._call("show").splitlines()
        # A name that there is not finds what it is a part of.
        if lines[:1] != [f"Place '{self.labgrid.place}':"]:
            raise UsageError(
                f"labgrid has no place {self.labgrid.place!r}",
                board=self.board,
                hint="labgrid-client places lists those that there are",
            )
        owner = next((line.partition(": ")[2] for line in lines if line.startswith("  acquired: ")), "None")
        return "" if owner == "None" else owner, _resources(lines)

    def address(self, resources: Mapping[str, Resource]) -> str:
        """``USER@HOST:PORT`` of its ``NetworkService``."""
        services = {name: one for name, one in resources.items() if one.get("cls") == "NetworkService"}
        named = self.labgrid.service
        if (named and named not in services) or (not named and len(services) != 1):
            has = f"has the services {', '.join(services)}" if services else "has no NetworkService"
            raise UsageError(
                f"labgrid's place {self.labgrid.place} {has}",
                board=self.board,
                hint="[labgrid] service names one; the place needs it for SSH"
                if services
                else "add one to its exporter",
            )
        service = services[named] if named else next(iter(services.values()))
        if not service.get("avail"):
            raise BoardUnreachable(f"labgrid says that {self.labgrid.place} is not there now", board=self.board)
        return _ssh_address(service.get("params", {}), self.board)

    def power(self, resources: Mapping[str, Resource]) -> dict[str, Command]:
        """Hooks for the table ``[power]``: labgrid's own switching of the place, where it has a power port."""
        if not any("Power" in str(one.get("cls")) for one in resources.values()):
            return {}
        settings = [f"{name}={value}" for name, value in self._settings.items()]
        return {
            action: Command(("env", *settings, *self._command, "power", action)) for action in ("on", "off", "cycle")
        }

    @property
    def _settings(self) -> dict[str, str]:
        """Who we are to labgrid, and where its coordinator is."""
        host, user = self._me.split("/")
        where = {"LG_COORDINATOR": self.labgrid.coordinator} if self.labgrid.coordinator else {}
        return {"LG_HOSTNAME": host, "LG_USERNAME": user, **where}

    @property
    def _me(self) -> str:
        return f"{_word(socket.gethostname())}/hil-farm-{_word(self.holder)}"

    @property
    def _command(self) -> list[str]:
        return [*shlex.split(self.labgrid.client), "-p", self.labgrid.place]

    def _call(self, action: str) -> str:
        command = [*self._command, action]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **self._settings},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_CALL_S,
            )
        except OSError as error:
            raise UsageError(
                f"labgrid's command line cannot be started: {error}",
                board=self.board,
                hint="install it beside hil (uv tool install labgrid), or name it: [labgrid] client = ...",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise BoardUnreachable(f"{shlex.join(command)} took over {_CALL_S:g} s", board=self.board) from error
        if done.returncode:
            raise _meaning(done.stdout, action, self.labgrid.place, self.board)
        return done.stdout


def _meaning(output: str, action: str, place: str, board: str) -> BoardError | UsageError:
    for text, kind, hint in _MEANS:
        if text in output:
            line = next(one for one in output.splitlines() if text in one)
            return kind(
                f"labgrid: {line.partition('Error: ')[2] or line}", board=board, hint=hint.replace("PLACE", place)
            )
    return BoardError(f"labgrid could not {action} the place {place}", board=board, detail=output[-_SHOWN:])


def _resources(lines: list[str]) -> dict[str, Resource]:
    """The resources that ``labgrid-client show`` printed: a line with the name, then a Python literal, indented."""
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


def _ssh_address(params: Mapping[str, Any], board: str) -> str:
    host, user, port = (str(params.get(key) or "") for key in ("address", "username", "port"))
    if not host or not user:
        raise UsageError("labgrid's NetworkService has no address or no username", board=board)
    if params.get("extra", {}).get("proxy_required"):
        raise UsageError(
            f"labgrid reaches {host} only by way of {params['extra'].get('proxy')}",
            board=board,
            hint="name it in the ssh config (ProxyJump) and set [connection] address, or run the farm's host there",
        )
    host = f"[{host}]" if ":" in host else host
    return f"{user}@{host}:{port}" if port else f"{user}@{host}"


def _word(text: str) -> str:
    """A text as part of a name that labgrid takes: it splits at slashes."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-") or "host"
