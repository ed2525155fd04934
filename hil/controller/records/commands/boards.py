"""Documents of `hil board`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from hil.controller.records.base import Count, Record, note
from hil.controller.records.console import ConsoleEntry


class ListedBoard(Record, kw_only=True):
    """A board with a config."""

    name: str
    hw_type: Annotated[str, note("`?` if the config cannot be read")]
    description: Annotated[str, note("or the error of a config that cannot be read")]
    path: str
    trusted: Annotated[bool, note("false if the config cannot be read, or needs trust (hil board trust)")]


class BoardList(Record, kw_only=True):
    """Output of `hil board list`."""

    boards: list[ListedBoard]


class ConnectionSettings(Record, kw_only=True):
    """The table [connection]."""

    address: str
    token_file: str
    ca: str
    cert: str
    key: str
    identity: str
    known_hosts: str
    accept_new_host_key: bool
    host_key: str
    folder: str
    fence: int
    lease: str
    host_meter: Annotated[str, note("kind of a leased board's meter that only jobs can use; or empty")] = ""


class RuntimeSettings(Record, kw_only=True):
    """The table [runtime]."""

    kind: Annotated[Literal["agent", "command"], note("`command` runs programs by a command, without an agent")]
    program: str
    file: str
    flags: list[str]
    input: str
    output: str
    parameter: str
    tensors: str
    environment: dict[str, str]
    version: str


class PowerSettings(Record, kw_only=True):
    """The table [power]."""

    hooks: Annotated[dict[str, dict[str, Any]], note("hook by action: a program (`argv`), or an HTTP request (`url`)")]
    delay: float
    boot_s: float
    timeout_s: float


class RecoverSettings(Record, kw_only=True):
    """The table [recover]."""

    steps: Annotated[
        list[str | dict[str, Any]],
        note("actions of [power], and commands on this machine (`argv`) or on the board (`board`)"),
    ]
    timeout_s: float


class ConsolePatternSettings(Record, kw_only=True):
    """A table of [[console.patterns]]."""

    name: str
    pattern: Annotated[str, note("regular expression")]
    meaning: str


class ConsoleSettings(Record, kw_only=True):
    """The table [console]."""

    serial: str
    baud: int
    command: list[str]
    address: Annotated[str, note("`tcp://HOST:PORT` or `telnet://HOST:PORT`")]
    labgrid: Annotated[str, note("`NetworkSerialPort` of the labgrid place")]
    boot: Annotated[str, note("pattern of the line that ends the boot")]
    boot_s: float
    patterns: list[ConsolePatternSettings]


class ProvisionSettings(Record, kw_only=True):
    """The table [provision]."""

    command: list[str]
    timeout_s: float
    boot_s: float


class SimulatorSettings(Record, kw_only=True):
    """The table [simulator]."""

    memory_limit: int
    arithmetic: str
    faults: list[str]


class LabgridSettings(Record, kw_only=True):
    """The table [labgrid]."""

    place: str
    coordinator: str
    service: str
    client: str


class MeterSettings(Record, kw_only=True):
    """The table [meter]."""

    kind: Annotated[str, note("empty without a meter")]
    command: list[str]
    path: str
    where: Annotated[str, note("`board`, `host`, or empty for the default")]
    columns: list[str]
    clock: str
    channel: int
    rate_hz: float
    windows: str
    idle_s: float
    start_s: float
    options: dict[str, Any]


class BoardSettings(Record, kw_only=True):
    """A board config."""

    name: str
    hw_type: str
    description: str
    runtime: str
    arithmetic: Annotated[str, note("arithmetic of all runtimes; empty: float32")]
    arithmetics: Annotated[dict[str, str], note("arithmetic by runtime, which overrides `arithmetic`")]
    devices: dict[str, str]
    compile_flags: dict[str, list[str]]
    labels: dict[str, Any]
    connection: ConnectionSettings
    command: RuntimeSettings
    power: PowerSettings
    recover: RecoverSettings
    console: ConsoleSettings
    provision: ProvisionSettings
    meter: MeterSettings
    stack: Annotated[dict[str, dict[str, Any]], note("part -> `text`, or the `command` or `board` command")] = {}
    simulator: SimulatorSettings | None
    labgrid: LabgridSettings
    path: str
    asks: Annotated[list[str], note("settings that need trust, as `[table] key`")]


class BoardDescription(Record, kw_only=True):
    """Output of `hil board show`."""

    board: BoardSettings


class TrustedFile(Record, kw_only=True):
    """A file that was trusted."""

    path: str
    asks: Annotated[list[str], note("settings that need trust, as `[table] key`")]


class TrustedFolder(Record, kw_only=True):
    """Output of `hil board trust DIR`."""

    folder: str
    files: list[TrustedFile]


class FileTrust(Record, kw_only=True):
    """Trust of a file."""

    path: str
    state: Annotated[str, note("`trusted`, `altered`, `gone` or `unknown`")]


class FolderTrust(Record, kw_only=True):
    """Trust of a directory."""

    folder: str
    files: list[FileTrust]


class TrustList(Record, kw_only=True):
    """Output of `hil board trust --list`."""

    folders: list[FolderTrust]


class RemovedTrust(Record, kw_only=True):
    """Output of `hil board trust --remove DIR`."""

    removed: str


CheckState = Literal["pass", "warn", "fail", "skip"]


class BoardCheck(Record):
    """Result of one check."""

    name: str
    state: CheckState
    found: str
    fix: Annotated[str, note("suggested action; empty if nothing is wrong")] = ""


class CheckReport(Record, kw_only=True):
    """Output of `hil board check`."""

    board: str
    ok: Annotated[bool, note("true if no check failed")]
    checks: Annotated[list[BoardCheck], note("from the network to the program; a failure may prevent the following")]
    exit_code: Annotated[int, note("0, or 4 if a check failed")]


class AddedBoard(Record, kw_only=True):
    """Output of `hil board add`."""

    board: str
    address: Annotated[str, note("address in the config; empty for a simulator")]
    path: Annotated[str, note("the new config; empty if a check failed")]
    ok: Annotated[bool, note("true if no check failed")]
    checks: Annotated[list[BoardCheck], note("empty with --no-check")]
    exit_code: Annotated[int, note("0, or 4 if a check failed")]


class RemovedBoard(Record, kw_only=True):
    """Output of `hil board remove`."""

    board: str
    path: Annotated[str, note("deleted config")]


class RenamedBoard(Record, kw_only=True):
    """Output of `hil board rename`."""

    board: str
    old: str
    path: Annotated[str, note("the new config")]


class RoundTripTimes(Record):
    """Times of round trips."""

    min_ns: int
    median_ns: int
    max_ns: int


class ClockError(Record, kw_only=True):
    """The board's clock, relative to the host's."""

    offset_ns: float
    error_ns: float


class PingReport(Record, kw_only=True):
    """Output of `hil board ping`."""

    board: str
    count: Annotated[int, Meta(ge=1)]
    round_trip: RoundTripTimes
    clock: Annotated[ClockError | UnsetType, note("absent for a board without an agent")] = UNSET


class ListedDevice(Record, kw_only=True):
    """A device that a runtime finds on a board."""

    runtime: str
    device: Annotated[str, note("name for --device, and for [devices] of a board config")]
    is_default: Annotated[bool, note("true if the runtime uses this device by default")]
    name: Annotated[str, note("name of the hardware; empty if the runtime does not report it")]
    type: Annotated[str, note("`cpu`, `gpu`, `integrated-gpu`, `discrete-gpu`, ...; empty if not reported")]
    software: Annotated[bool, note("true for a GPU that the CPU computes; its times are not GPU times")]
    driver: Annotated[str, note("driver and version; empty if not reported")]
    properties: Annotated[dict[str, str], note("what decides the compile target, such as `subgroup_size`")]


class DeviceList(Record, kw_only=True):
    """Output of `hil board devices`."""

    board: str
    devices: Annotated[list[ListedDevice], note("by runtime, the default device first")]
    errors: Annotated[dict[str, str], note("runtimes that do not work, with the reason")]


class BoardInfo(Record, kw_only=True):
    """Output of `hil board info`."""

    board: str
    host_key: Annotated[str, note("with SSH: fingerprint of the host key, SHA256:...; otherwise empty")]
    info: Annotated[dict[str, Any], note("message DescribeReply of protos/hil/v1/agent.proto")]


class BoardLogs(Record, kw_only=True):
    """Output of `hil board logs`."""

    board: str
    lines: list[str]


class ResetReport(Record, kw_only=True):
    """Output of `hil board reset`."""

    board: str
    action: Annotated[str, note("`reset`, `off`, `on` or `cycle`")]
    answers: Annotated[bool, note("true if hil waited until the board responded")]
    seconds: float
    output: Annotated[str, note("output of the hook")]
    boot_s: Annotated[
        float | None, note("from the action to the boot pattern on the console; null without [console] boot")
    ] = None


class ConsoleDocument(Record, kw_only=True):
    """Output of `hil board console --json`."""

    board: str
    lines: list[ConsoleEntry]


class ProvisionReport(Record, kw_only=True):
    """Output of `hil board provision`."""

    board: str
    file: Annotated[str, note("name of the image")]
    sha256: Annotated[str, note("digest of the image, in hex")]
    seconds: Annotated[float, note("until the board responded")]
    boot_s: Annotated[
        float | None, note("from the command to the boot pattern on the console; null without [console] boot")
    ] = None
    ok: Annotated[bool, note("true if the board passes the checks")]
    checks: Annotated[list[BoardCheck], note("checks of hil board check")]
    exit_code: int


class RecoveryStep(Record, kw_only=True):
    """Attempted recovery step."""

    name: Annotated[str, note("an action of [power], or a command")]
    error: Annotated[str, note("error of the step itself; empty if it succeeded")]
    problem: Annotated[str, note("result of the following check; empty if the board works")]


class RecoveryReport(Record, kw_only=True):
    """Output of `hil board recover`."""

    board: str
    works: Annotated[bool, note("true if a tiny model runs and returns correct outputs")]
    steps: list[RecoveryStep]
    exit_code: Annotated[int, note("0, or 4 if the board does not work")]


class DeployedPackage(Record, kw_only=True):
    """Package that `hil board deploy --package` installed."""

    name: Annotated[str, note("name and version")]
    id: Annotated[str, note("name on the board, with the digest of the files")]
    runtimes: list[str]


class DeployedAgent(Record, kw_only=True):
    """Output of `hil board deploy`."""

    board: str
    folder: str
    build: Annotated[str, note("digest of the agent and its packages")]
    runtimes: list[str]
    packages: list[DeployedPackage] = []
    pushed_bytes: Count
    used_bytes: Annotated[Count, note("size of hil's files on the board")]
    seconds: float


class RemovedAgent(Record, kw_only=True):
    """Output of `hil board clean`."""

    board: str
    folder: str
    removed: Annotated[bool, note("false if the board had no hil files")]
    freed_bytes: Count


class FenceReset(Record, kw_only=True):
    """Output of `hil board reset-fence`."""

    board: Annotated[str, note("board, or the directory of --store")]
    fence: Annotated[Literal[0], note("highest fence that the board has seen since")]
