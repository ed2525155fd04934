"""Board config values, as parsed from the file's tables by :mod:`hil.core.board_parser`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.core.arithmetic import FLOAT32
from hil.core.runtimes import DEFAULT_RUNTIME, list_known_runtimes

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
    """Connection settings for a board. Paths are relative to the config."""

    # An agent's ``unix:PATH`` or ``HOST:PORT``; for SSH ``USER@HOST[:PORT]`` or ``ssh:ALIAS``. "" if ``--board``
    # specifies the address, and for simulators.
    address: str = ""
    # token_file, ca, cert, key: token file and PEM files for an agent that listens on a port.
    token_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    identity: str = ""  # SSH private key; "" uses the ssh agent, the ssh config and default keys
    known_hosts: str = ""  # file with pinned host keys; "" uses the user's known_hosts
    accept_new_host_key: bool = False
    host_key: str = (
        ""  # required fingerprint of the SSH host key (``SHA256:...``), which hil pins; "" for any pinned key
    )
    folder: str = ""  # hil's directory on the board; "" means ``.hil`` in the login's home
    fence: int = 0  # fence for opening sessions; the board rejects a fence below its own as stale; 0 disables fencing
    lease: str = ""  # lease text for results: holder and farm; "" without a farm


@dataclass(frozen=True)
class Simulator:
    """Simulated device: memory limit for a program (bytes, 0 is unlimited), arithmetic ("" is float32), faults.

    The simulated arithmetic may differ from the declared arithmetic (:attr:`BoardConfig.arithmetic`), like on
    a board with a defect.
    """

    memory_limit: int = 0
    arithmetic: str = ""
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Labgrid:
    """Board managed by labgrid. The farm's host acquires the place, which has the SSH address and power switch."""

    place: str = ""  # name; "" means not managed by labgrid
    coordinator: str = ""  # ``HOST:PORT``; "" uses ``LG_COORDINATOR``, then labgrid's default
    service: str = ""  # name of the ``NetworkService`` to use if the place has more than one service
    client: str = "labgrid-client"


@dataclass(frozen=True)
class Command:
    """Program to run on this machine, without a shell."""

    argv: tuple[str, ...]


@dataclass(frozen=True)
class Http:
    """HTTP request to send, for example to a switched socket or power distribution unit."""

    url: str
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""


@dataclass(frozen=True)
class Power:
    """The ``[power]`` table."""

    hooks: Mapping[str, Command | Http] = field(default_factory=dict)
    delay: float = 2.0  # seconds between off and on if no cycle hook exists
    boot_s: float = 120.0  # boot timeout in seconds
    timeout_s: float = 60.0  # hook timeout in seconds

    def can(self, action: str) -> bool:
        """Return True if a hook exists for the action. The hooks off and on together also serve as a cycle."""
        return action in self.hooks or (action == "cycle" and {"off", "on"} <= self.hooks.keys())


@dataclass(frozen=True)
class BoardCommand:
    """Program to run on the board, over SSH and without a shell."""

    board: tuple[str, ...]  # program and arguments


@dataclass(frozen=True)
class Recover:
    """The ``[recover]`` table: steps to recover a stuck board."""

    # Actions from [power] and commands, in the order to try.
    steps: tuple[str | Command | BoardCommand, ...] = ()
    timeout_s: float = 60.0  # timeout per command, in seconds


@dataclass(frozen=True)
class MeasureCommands:
    """The ``[measure]`` table: commands before and after a measurement."""

    before: tuple[Command | BoardCommand, ...] = ()
    after: tuple[Command | BoardCommand, ...] = ()
    timeout_s: float = 60.0  # timeout per command, in seconds


@dataclass(frozen=True)
class RuntimeCommand:
    """Settings to run programs on a board without an agent."""

    # ``agent``: hil's agent runs programs if the board supports it; ``command``: always use this command.
    kind: str = "agent"
    program: str = ""  # program on the board, by name or path; "" is the ``iree-run-module`` that hil installs
    file: str = ""  # program on the host, relative to the config, that hil installs instead of ``program``
    # Arguments. hil substitutes ``{device}``, ``{module}``, ``{function}`` and ``{folder}`` (the run's directory, which
    # is the working directory). A flag ``{inputs}``, ``{outputs}`` or ``{parameters}`` expands to an argument per
    # tensor.
    flags: tuple[str, ...] = DEFAULT_FLAGS
    # Input argument: ``{value}`` is an iree-run-module value (``2x3xf32=@FILE``, ``@FILE.npy`` or a number), ``{type}``
    # is ``2x3xf32``, ``{file}`` is a file.
    input: str = "--input={value}"
    output: str = "--output=@{file}"  # output argument; ``{file}`` is the file to write
    parameter: str = "--parameters={scope}={file}"  # argument for a weights file: ``{scope}`` and ``{file}``
    # Tensor file format: ``bin`` (raw elements), ``npy``, or ``auto`` (best format for iree-run-module).
    tensors: str = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    version: str = ""  # runtime version for the record; "" if unknown

    @property
    def is_ours(self) -> bool:
        """True if the program is the iree-run-module that hil installs."""
        return not self.program and not self.file

    def can_run(self, runtime: str) -> bool:
        """Return True if the command may support a runtime.

        A program from the config is assumed to support every runtime.
        """
        return runtime == "iree" or not self.is_ours


@dataclass(frozen=True)
class Microcontroller:
    """The ``[mcu]`` table: chip, flash command and time limits of a board without an operating system."""

    values: Mapping[str, str]  # chip and its overrides, as for :func:`hil.core.chips.parse_chip`
    flash: tuple[str, ...] = ()  # command that writes firmware; ``{elf}`` and ``{bin}`` are the files
    reset: tuple[str, ...] = ()  # command that restarts the board
    boot_s: float = 10.0  # maximum time from flashing until the firmware answers
    watchdog_s: float = 60.0  # maximum time of a run, measured on the board


@dataclass(frozen=True)
class BoardConfig:
    """Parsed board config."""

    name: str
    hw_type: str  # hardware type; ``sim...`` for simulators
    description: str = ""
    runtime: str = DEFAULT_RUNTIME
    arithmetic: str = ""  # arithmetic for all runtimes: float16, ...; "" is float32
    # runtime -> arithmetic that overrides ``arithmetic`` (table ``[arithmetic]``).
    arithmetics: Mapping[str, str] = field(default_factory=dict)
    # For an emulated board whose clock counts instructions: an instruction takes ``2**icount_shift`` ns; -1 for others.
    icount_shift: int = -1
    devices: Mapping[str, str] = field(default_factory=dict)
    # compiler -> flags, including target flags.
    compile_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=dict)
    connection: Connection = Connection()
    # Settings to run programs without an agent (table ``[runtime]``).
    command: RuntimeCommand = field(default_factory=RuntimeCommand)
    power: Power = field(default_factory=Power)
    recover: Recover = Recover()
    measure: MeasureCommands = MeasureCommands()
    simulator: Simulator | None = None
    labgrid: Labgrid = Labgrid()
    mcu: Microcontroller | None = None
    path: Path = Path()
    text: str = field(default="", repr=False, compare=False)
    # Settings that need the user's trust, as ``[table] key``.
    asks: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def has_time(self) -> bool:
        """False if the board's clock counts instructions."""
        return self.icount_shift < 0

    def get_arithmetic(self, runtime: str) -> str:
        """Return the arithmetic that a runtime uses on this board; "" is float32."""
        return self.arithmetics.get(runtime) or self.arithmetic

    @property
    def is_exact(self) -> bool:
        """True if the board is a simulator that computes like the reference. Its arithmetic is known."""
        return self.simulator is not None and self.simulator.arithmetic in ("", FLOAT32)

    def has_runtime(self, runtime: str) -> bool:
        """Return False if the config lists the board's runtimes and this runtime is missing.

        Simulated boards also have the runtimes of installed packages.
        """
        if not self.devices or runtime in self.devices:
            return True
        known = list_known_runtimes()
        return self.simulator is not None and runtime in known and known[runtime].of_package

    @property
    def recovery_steps(self) -> tuple[str | Command | BoardCommand, ...]:
        """Steps from ``[recover]``; by default the ``[power]`` actions reset and cycle."""
        return self.recover.steps or tuple(action for action in ("reset", "cycle") if self.power.can(action))

    @property
    def is_simulator(self) -> bool:
        """True if hil starts this board as a simulator."""
        return self.simulator is not None and not self.connection.address


def fill(pattern: str, values: Mapping[str, str]) -> str:
    """Substitute placeholders in a single pass, so that braces in values stay unchanged."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), pattern)
