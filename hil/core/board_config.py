"""What a board's config says: the values that the tables of the file become (:mod:`hil.core.boards` reads it)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.core.runtimes import DEFAULT_RUNTIME

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
    """How the board is reached; paths are relative to the config."""

    # an agent's ``unix:PATH`` or ``HOST:PORT``, or over SSH ``USER@HOST[:PORT]`` or ``ssh:ALIAS``; "" where ``--board``
    # gives it, and for a simulator.
    address: str = ""
    # token_file, ca, cert, key: of an agent that listens on a port: the token's file, and PEM files.
    token_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    identity: str = ""  # private key for SSH; "" leaves it to the ssh agent, the ssh config and the usual keys
    known_hosts: str = ""  # file of pinned host keys; "" is the user's own
    accept_new_host_key: bool = False
    folder: str = ""  # hil's folder on the board; "" is ``.hil`` in the login's home
    fence: int = 0  # sessions are opened with it, so that nobody with a lower one can use the board; 0 is none
    lease: str = ""  # of a board that a farm lent: whose and from where, for results; "" is none


@dataclass(frozen=True)
class Simulator:
    """A simulated device: most memory for a program (bytes, 0 is no limit), arithmetic ("" is float32), faults.

    What it computes in is not what the board declares (:attr:`BoardConfig.arithmetic`): a board may compute otherwise
    than it should.
    """

    memory_limit: int = 0
    arithmetic: str = ""
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Labgrid:
    """A board that labgrid has: the farm's host acquires its place, which has the SSH address and the power switch."""

    place: str = ""  # its name; "" is no labgrid place
    coordinator: str = ""  # ``HOST:PORT``; "" is ``LG_COORDINATOR``, else labgrid's own default
    service: str = ""  # which ``NetworkService`` it is, where the place has several
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
    """The ``[power]`` table."""

    hooks: Mapping[str, Command | Http] = field(default_factory=dict)
    delay: float = 2.0  # seconds between off and on, where nothing does a cycle
    boot_s: float = 120.0  # most seconds that the board takes to answer again
    timeout_s: float = 60.0  # most seconds that a hook may take

    def can(self, action: str) -> bool:
        """Whether there is a hook for the action; a cycle may be made of off and on."""
        return action in self.hooks or (action == "cycle" and {"off", "on"} <= self.hooks.keys())


@dataclass(frozen=True)
class RuntimeCommand:
    """How a board without an agent runs a program."""

    # ``agent``: hil's agent runs programs, where the board can have it; ``command``: this command always does.
    kind: str = "agent"
    program: str = ""  # the program on the board, by name or path; "" is the ``iree-run-module`` that hil puts there
    file: str = ""  # a program on the host, relative to the config, that hil puts there in place of ``program``
    # its arguments. ``{device}``, ``{module}``, ``{function}`` and ``{folder}`` (the run's own, where it starts) are
    # filled in; a flag that is ``{inputs}``, ``{outputs}`` or ``{parameters}`` becomes one a tensor.
    flags: tuple[str, ...] = DEFAULT_FLAGS
    # an input's argument: ``{value}`` is what iree-run-module takes (``2x3xf32=@FILE``, ``@FILE.npy`` or a number),
    # ``{type}`` is ``2x3xf32``, ``{file}`` a file.
    input: str = "--input={value}"
    output: str = "--output=@{file}"  # an output's argument: ``{file}`` is the file to write
    parameter: str = "--parameters={scope}={file}"  # the argument for a file of weights: ``{scope}`` and ``{file}``
    # how files hold tensors: ``bin`` (elements alone), ``npy``, or ``auto``: what iree-run-module does best.
    tensors: str = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    version: str = ""  # what the record calls the runtime's version; "" where it is not known

    @property
    def is_ours(self) -> bool:
        """Whether it is the iree-run-module that hil puts there."""
        return not self.program and not self.file

    def runs(self, runtime: str) -> bool:
        """Whether it may run the programs of a runtime: of one that the config names, nothing is known."""
        return runtime == "iree" or not self.is_ours


@dataclass(frozen=True)
class BoardConfig:
    """A board config."""

    name: str
    hw_type: str  # kind of hardware; ``sim...`` for simulators
    description: str = ""
    runtime: str = DEFAULT_RUNTIME
    arithmetic: str = ""  # what its runtimes compute in: float16, ...; "" is float32
    # runtime -> the same of one of them (the table ``[arithmetic]``).
    arithmetics: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    # compiler -> flags, the target's among them.
    compile_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=dict)
    connection: Connection = Connection()
    # how a program is run where no agent is (the table ``[runtime]``).
    command: RuntimeCommand = field(default_factory=RuntimeCommand)
    power: Power = field(default_factory=Power)
    simulator: Simulator | None = None
    labgrid: Labgrid = Labgrid()
    path: Path = Path()
    text: str = field(default="", repr=False, compare=False)
    # what of it needs the user's trust, as ``[table] key``.
    asks: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def arithmetic_of(self, runtime: str) -> str:
        """The arithmetic that a runtime computes in on this board; "" is float32."""
        return self.arithmetics.get(runtime) or self.arithmetic

    @property
    def is_simulator(self) -> bool:
        """Whether hil starts this board itself."""
        return self.simulator is not None and not self.connection.address


def fill(pattern: str, values: Mapping[str, str]) -> str:
    """A pattern with its placeholders filled in, in one pass: a value that holds braces stays as it is."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), pattern)
