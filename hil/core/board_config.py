"""What a board's config says: the values that the tables of the file become (:mod:`hil.core.boards` reads it)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ACTIONS = ("reset", "off", "on", "cycle")
DEFAULT_FLAGS = (
    "--device={device}",
    "--module={module}",
    "--function={function}",
    "{parameters}",
    "{inputs}",
    "{outputs}",
)
PLACEHOLDER = re.compile(r"\{(\w*)\}")


@dataclass(frozen=True)
class Connection:
    """How the board is reached; paths are relative to the config.

    Attributes:
        address: an agent's ``unix:PATH`` or ``HOST:PORT``, or over SSH ``USER@HOST[:PORT]`` or ``ssh:ALIAS``; "" where
            ``--board`` gives it, and for a simulator.
        token_file, ca, cert, key: of an agent that listens on a port: the token's file, and PEM files.
        identity: private key for SSH; "" leaves it to the ssh agent, the ssh config and the usual keys.
        known_hosts: file of pinned host keys; "" is the user's own.
        folder: hil's folder on the board; "" is ``.hil`` in the login's home.
        fence: sessions are opened with it, so that nobody with a lower one can use the board; 0 is none.
        lease: of a board that a farm lent: whose and from where, for results; "" is none.
    """

    address: str = ""
    token_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    identity: str = ""
    known_hosts: str = ""
    accept_new_host_key: bool = False
    folder: str = ""
    fence: int = 0
    lease: str = ""


@dataclass(frozen=True)
class Simulator:
    """A simulated device: most memory for a program (bytes, 0 is no limit), arithmetic ("" is exact), faults."""

    memory_limit: int = 0
    arithmetic: str = ""
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Labgrid:
    """A board that labgrid has: the farm's host acquires its place, which tells the SSH address and switches the power.

    Attributes:
        place: its name; "" is no labgrid place.
        coordinator: ``HOST:PORT``; "" is ``LG_COORDINATOR``, else labgrid's own default.
        service: which ``NetworkService`` it is, where the place has several.
    """

    place: str = ""
    coordinator: str = ""
    service: str = ""
    client: str = "labgrid-client"


@dataclass(frozen=True)
class Command:
    """A program to run on this machine, without a shell."""

    argv: tuple[str, ...]


@dataclass(frozen=True)
class Http:
    """A request to send: to a switched socket, a power distribution unit."""

    url: str
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""


@dataclass(frozen=True)
class Power:
    """The ``[power]`` table.

    Attributes:
        delay: seconds between off and on, where nothing does a cycle.
        boot_s: most seconds that the board takes to answer again.
        timeout_s: most seconds that a hook may take.
    """

    hooks: Mapping[str, Command | Http] = field(default_factory=dict)
    delay: float = 2.0
    boot_s: float = 120.0
    timeout_s: float = 60.0

    def can(self, action: str) -> bool:
        """Whether there is a hook for the action; a cycle may be made of off and on."""
        return action in self.hooks or (action == "cycle" and {"off", "on"} <= self.hooks.keys())


@dataclass(frozen=True)
class RuntimeCommand:
    """How a board without an agent runs a program.

    Attributes:
        kind: ``agent``: hil's agent runs programs, where the board can have it; ``command``: this command always does.
        program: the program on the board, by name or path; "" is the ``iree-run-module`` that hil puts there.
        file: a program on the host, relative to the config, that hil puts there in place of ``program``.
        flags: its arguments. ``{device}``, ``{module}``, ``{function}`` and ``{folder}`` (the run's own, where it
            starts) are filled in; a flag that is ``{inputs}``, ``{outputs}`` or ``{parameters}`` becomes one a tensor.
        input: an input's argument: ``{value}`` is what iree-run-module takes (``2x3xf32=@FILE``, ``@FILE.npy`` or a
            number), ``{type}`` is ``2x3xf32``, ``{file}`` a file.
        output: an output's argument: ``{file}`` is the file to write.
        parameter: the argument for a file of weights: ``{scope}`` and ``{file}``.
        tensors: how files hold tensors: ``bin`` (elements alone), ``npy``, or ``auto``: what iree-run-module does best.
        version: what the record calls the runtime's version; "" where it is not known.
    """

    kind: str = "agent"
    program: str = ""
    file: str = ""
    flags: tuple[str, ...] = DEFAULT_FLAGS
    input: str = "--input={value}"
    output: str = "--output=@{file}"
    parameter: str = "--parameters={scope}={file}"
    tensors: str = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    version: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether it is the iree-run-module that hil puts there."""
        return not self.program and not self.file

    def runs(self, runtime: str) -> bool:
        """Whether it may run the programs of a runtime: of one that the config names, nothing is known."""
        return runtime == "iree" or not self.is_ours


@dataclass(frozen=True)
class BoardConfig:
    """A board config.

    Attributes:
        hw_type: kind of hardware; ``sim...`` for simulators.
        compile_flags: compiler -> flags, the target's among them.
        command: how a program is run where no agent is (the table ``[runtime]``).
        asks: what of it needs the user's trust, as ``[table] key``.
    """

    name: str
    hw_type: str
    description: str = ""
    runtime: str = "iree"
    devices: Mapping[str, str] = field(default_factory=dict)
    compile_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=dict)
    connection: Connection = Connection()
    command: RuntimeCommand = field(default_factory=RuntimeCommand)
    power: Power = field(default_factory=Power)
    simulator: Simulator | None = None
    labgrid: Labgrid = Labgrid()
    path: Path = Path()
    text: str = field(default="", repr=False, compare=False)
    asks: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def is_simulator(self) -> bool:
        """Whether hil starts this board itself."""
        return self.simulator is not None and not self.connection.address


def fill(pattern: str, values: Mapping[str, str]) -> str:
    """A pattern with its placeholders filled in, in one pass: a value that holds braces stays as it is."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), pattern)
