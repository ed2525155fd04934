"""Board config values, as parsed from the file's tables by :mod:`hil.core.board_parser`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.core.arithmetic import ARITHMETICS, FLOAT32
from hil.core.config_keys import make_key
from hil.core.console_config import ConsoleConfig, Provision
from hil.core.mcu_config import MCU_RUNTIME, Microcontroller
from hil.core.meter_config import MeterConfig
from hil.core.peak_config import PeakConfig
from hil.core.runtimes import DEFAULT_RUNTIME, list_known_runtimes
from hil.core.stack_config import StackValue

ACTIONS = ("reset", "off", "on", "cycle")
DEFAULT_FLAGS = (
    "--device={device}",
    "--module={module}",
    "--function={function}",
    "{parameters}",
    "{inputs}",
    "{outputs}",
)
# Values of ``kind`` and ``tensors`` in [runtime].
RUNTIME_KINDS = ("agent", "command")
TENSOR_FORMATS = ("auto", "bin", "npy")
# QEMU accepts shifts of -icount up to this number.
MAX_ICOUNT_SHIFT = 10
PLACEHOLDER = re.compile(r"\{(\w*)\}")


@dataclass(frozen=True)
class Connection:
    """Connection settings for a board. Paths are relative to the config."""

    address: str = make_key(
        "",
        "Address: the agent's `unix:PATH` or `HOST:PORT`; `USER@HOST[:PORT]` or `ssh:ALIAS` for SSH; or "
        "`farm:SELECTOR`. Without an address, the config describes a kind of board or a simulator.",
    )
    token_file: str = make_key("", "File with the agent's token.")
    ca: str = make_key("", "Certificate authority (PEM) of the agent's certificate; enables TLS.")
    cert: str = make_key("", "Client certificate (PEM) for mutual TLS.")
    key: str = make_key("", "Private key (PEM) of the client certificate.")
    identity: str = make_key("", "SSH: private key.", unset="the ssh agent, the ssh config and the usual keys")
    known_hosts: str = make_key("", "SSH: file with pinned host keys.", unset="the user's file")
    accept_new_host_key: bool = make_key(False, "SSH: pin the key of a new host.")
    host_key: str = make_key(
        "",
        "SSH: required fingerprint of the host key (`SHA256:...`). hil pins this key, and rejects other keys.",
        unset="any pinned key",
    )
    folder: str = make_key("", "SSH: hil's directory on the board.", unset="`.hil` in the login's home")
    fence: int = make_key(
        0,
        "[Fence](protocol.md#session-and-fence) number of sessions. After a session with this number, the board "
        "rejects sessions with a lower number. 0 disables the fence.",
        bounds=(0, (1 << 63) - 1),
    )
    lease: str = make_key(
        "", "[Farm](farm.md) lease data. hil sets this key for a leased board, and records the data in results."
    )
    host_meter: str = make_key(
        "",
        "Kind of the [meter](meters.md#boards-of-a-farm) of a leased board, if only jobs can use it. hil sets this key "
        "for a leased board.",
    )
    image: str = make_key(
        "",
        "[Image](board-images.md) of a leased board, as JSON. hil sets this key, and records the image in results.",
        unset="the image that hil wrote to the board of this config",
    )


@dataclass(frozen=True)
class AccessList:
    """Users and groups of a farm that may use the board. Without both, everyone may use the board."""

    users: tuple[str, ...] = make_key((), "In a [farm](farm-access.md): these users may use the board.")
    groups: tuple[str, ...] = make_key(
        (), "In a [farm](farm-access.md): users with one of these groups may use the board."
    )


@dataclass(frozen=True)
class Simulator:
    """Simulated device.

    The simulated arithmetic may differ from the declared arithmetic (:attr:`BoardConfig.arithmetic`), like on
    a board with a defect.
    """

    memory_limit: int = make_key(0, "Maximum memory for a program and tensors, in bytes; 0 disables the limit.")
    arithmetic: str = make_key(
        "",
        "Simulated [arithmetic](simulator-arithmetic.md). hil compiles IREE programs with this arithmetic, unless "
        "`[compile_flags]` sets one. Other runtimes than IREE, ONNX Runtime and those of packages require `float32`.",
        values=ARITHMETICS,
        unset="`float32`",
    )
    faults: tuple[str, ...] = make_key((), "List of [faults](simulator.md#faults).")


@dataclass(frozen=True)
class Labgrid:
    """Board managed by labgrid. The farm's host acquires the place, which has the SSH address and power switch."""

    place: str = make_key(
        "",
        "Place name at a [labgrid](https://labgrid.readthedocs.io) coordinator. A farm host acquires the place. If the "
        "config sets no address or no power switch, the host uses the SSH address (`NetworkService`) or the power "
        "switch from labgrid.",
    )
    coordinator: str = make_key("", "`HOST:PORT` of the coordinator.", unset="`LG_COORDINATOR`, then labgrid's default")
    service: str = make_key("", "`NetworkService` name, if the place has more than one.")
    client: str = make_key("labgrid-client", "labgrid's command (install with `uv tool install labgrid`).")


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
    delay: float = make_key(2.0, "Seconds between `off` and `on`, if the table has no `cycle`.")
    boot_s: float = make_key(120.0, "Boot timeout, in seconds.")
    timeout_s: float = make_key(60.0, "Timeout of an action, in seconds.")

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

    steps: tuple[str | Command | BoardCommand, ...] = make_key(
        (),
        "[Steps](board-failures.md#when-a-board-is-stuck) to recover a stuck board, in this order: actions of "
        "`[power]`, commands on this machine, and commands on the board.",
        unset="`reset` and `cycle` of `[power]`",
    )
    timeout_s: float = make_key(60.0, "Timeout of a command, in seconds.")


@dataclass(frozen=True)
class MeasureCommands:
    """The ``[measure]`` table: commands before and after a measurement."""

    before: tuple[Command | BoardCommand, ...] = make_key(
        (), "[Commands](conditions.md#prepare-the-board) before a measurement, on this machine or on the board."
    )
    after: tuple[Command | BoardCommand, ...] = make_key((), "Commands after a measurement.")
    timeout_s: float = make_key(60.0, "Timeout of a command, in seconds.")


@dataclass(frozen=True)
class RuntimeCommand:
    """Settings to run programs on a board without an agent."""

    kind: str = make_key(
        "agent",
        "`agent`: hil's agent runs programs if the board supports it; `command`: always use this command.",
        values=RUNTIME_KINDS,
    )
    program: str = make_key(
        "", "Program on the board: a name or an absolute path.", unset="the `iree-run-module` that hil installs"
    )
    file: str = make_key("", "Program on the host, relative to the config, that hil installs instead of `program`.")
    flags: tuple[str, ...] = make_key(
        DEFAULT_FLAGS,
        "Arguments. hil replaces `{device}`, `{module}`, `{function}` and `{folder}` (working directory of the run). A "
        "flag `{inputs}`, `{outputs}` or `{parameters}` becomes an argument per tensor.",
    )
    input: str = make_key(
        "--input={value}",
        "Argument of an input: `{value}` is a value of iree-run-module (`2x3xf32=@FILE`, `@FILE.npy` or a number), "
        "`{type}` is `2x3xf32`, `{file}` is a file.",
    )
    output: str = make_key("--output=@{file}", "Argument of an output; the program writes `{file}`.")
    parameter: str = make_key("--parameters={scope}={file}", "Argument of a weights file: `{scope}` and `{file}`.")
    tensors: str = make_key(
        "auto",
        "Format of tensor files: `bin` (raw elements), `npy`, or `auto` (the best format for iree-run-module).",
        values=TENSOR_FORMATS,
    )
    environment: Mapping[str, str] = make_key(dict, "Environment variables of the program.")
    version: str = make_key("", "Version of the runtime, for results.", unset="unknown")

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
class BoardConfig:
    """Parsed board config."""

    name: str = make_key(dataclasses.MISSING, "Name in results.", unset="the file's name")
    hw_type: str = make_key(
        dataclasses.MISSING,
        "Hardware type; `sim...` for simulators. Must match `--runtime-hw-type` if both are set.",
        unset="the file's name",
    )
    description: str = make_key("", "Text for people.")
    runtime: str = make_key(DEFAULT_RUNTIME, "Default runtime.")
    arithmetic: str = make_key(
        "",
        "Arithmetic of the board for all runtimes, which sets the [tolerances](arithmetic.md).",
        values=ARITHMETICS,
        unset="`float32`",
    )
    arithmetics: Mapping[str, str] = make_key(dict, "Arithmetic for this runtime only.", values=ARITHMETICS)
    icount_shift: int = make_key(
        -1,
        "For an [emulated board](instructions.md#emulated-boards) whose clock counts instructions: an instruction "
        "takes `2^icount_shift` ns.",
        bounds=(0, MAX_ICOUNT_SHIFT),
        unset="the clock measures time",
    )
    devices: Mapping[str, str] = make_key(
        dict,
        'Required [device](placement.md) for this runtime; with `""`, the runtime chooses the device. If a config has '
        'this table, hil rejects runtimes that the table does not list. The key `"*"` applies to all other built-in '
        "runtimes.",
    )
    compile_flags: Mapping[str, tuple[str, ...]] = make_key(
        dict,
        "List of flags for this compiler, including the target; `--compile-flag` adds more. If the list contains only "
        "`--arithmetic=NAME`, hil adds the target's flags.",
    )
    labels: Mapping[str, Any] = make_key(dict, "Label to select boards.")
    access: AccessList = AccessList()
    connection: Connection = Connection()
    # Settings to run programs without an agent (table ``[runtime]``).
    command: RuntimeCommand = field(default_factory=RuntimeCommand)
    power: Power = field(default_factory=Power)
    recover: Recover = Recover()
    measure: MeasureCommands = MeasureCommands()
    meter: MeterConfig = field(default_factory=MeterConfig)
    peak: PeakConfig = field(default_factory=PeakConfig)
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    provision: Provision = field(default_factory=Provision)
    stack: Mapping[str, StackValue] = make_key(
        dict,
        "[Part of the stack](stack.md), such as `driver`: its version, the command on the board that prints it "
        '(`["program"]`), or a command on this machine (`{ command = ["program"] }`). A command needs trust.',
    )
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

        Simulated boards also have the runtimes of installed packages. A microcontroller runs only firmware.
        """
        if self.mcu is not None:
            return runtime == MCU_RUNTIME
        if not self.devices or runtime in self.devices:
            return True
        known = list_known_runtimes()
        return self.simulator is not None and runtime in known and known[runtime].of_package

    @property
    def recovery_steps(self) -> tuple[str | Command | BoardCommand, ...]:
        """Steps from ``[recover]``; by default the ``[power]`` actions reset and cycle."""
        return self.recover.steps or tuple(action for action in ("reset", "cycle") if self.power.can(action))

    @property
    def has_board_meter(self) -> bool:
        """True if the board's agent reads the meter."""
        return self.meter.is_agent_sensor(is_emulated=self.is_simulator or self.mcu is not None)

    @property
    def is_simulator(self) -> bool:
        """True if hil starts this board as a simulator."""
        return self.simulator is not None and not self.connection.address


def fill(pattern: str, values: Mapping[str, str]) -> str:
    """Substitute placeholders in a single pass, so that braces in values stay unchanged."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), pattern)
