"""Records of a run: run.json of `hil run`, `hil bundle run`, `hil trace run` and `hil bench`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from hil.controller.records.base import Count, Record, Samples, make_record, note
from hil.controller.records.console import ConsoleQuoteRecord, StoredConsole
from hil.controller.records.measurements.conditions import Conditions, MeasurementGrade
from hil.controller.records.measurements.energy import EnergyMeasurement
from hil.controller.records.measurements.generation import StoredGeneration
from hil.controller.records.measurements.instructions import InstructionStatistics
from hil.controller.records.outputs import (
    DType,
    FailedReference,
    Origin,
    Placement,
    ProfileDirectory,
    RelationName,
    StoredTensor,
    StoredVerdict,
)
from hil.controller.records.stack import StackPart
from hil.core.results import Outcome, Relation

Digest = Annotated[str, Meta(pattern="^(blake3|sha256):[0-9a-f]{64}$")]
CachedStage = Literal["import", "compile", "refer"]
Seconds = Annotated[float, Meta(ge=0)] | None


class StoredSpec(Record, kw_only=True):
    """Name, dtype and shape of a model's input or output."""

    name: str
    dtype: DType
    shape: Annotated[list[Count | str | None], note("sizes and symbols; null for an unknown size")]


class CaseError(Record, kw_only=True):
    """Error of a case."""

    kind: Annotated[str, note("a class of hil/errors.py")]
    hint: str
    board: str
    detail: Annotated[str, note("output of the tool or agent that failed")]
    console: Annotated[list[ConsoleQuoteRecord], note("lines of the board's console that explain the error")] = []


class StoredModel(Record, kw_only=True):
    """The model of a case."""

    format: str
    digest: Digest
    function: str
    inputs: list[StoredSpec] | None
    outputs: list[StoredSpec] | None


class StoredArtifact(Record, kw_only=True):
    """The program of a case."""

    runtime: str
    compiler: str
    flags: list[str]
    function: str
    main: Annotated[str, note("file to load; empty in records of earlier versions")] = ""
    digests: dict[str, Digest]
    bytes: Count
    cached: bool
    notes: Annotated[
        dict[str, Any],
        note(
            "notes from the compiler: `text`; with ExecuTorch also `delegation`, `lower_s`, `program_bytes` and "
            "`quantise_s`; for a microcontroller `flash_bytes`, `ram_bytes`, `chip_flash_bytes` and `chip_ram_bytes`"
        ),
    ]


class StageTimes(Record, kw_only=True):
    """Time of each stage in seconds, on the host's clock; null if the stage did not run."""

    boot_s: Annotated[
        Seconds, note("from switching the power to the boot pattern on the console; null if hil did not wait for it")
    ] = None
    import_s: Seconds
    compile_s: Seconds
    push_s: Seconds
    load_s: Seconds
    warmup_s: Seconds
    run_s: Seconds
    fetch_s: Seconds
    refer_s: Seconds
    compare_s: Seconds


class DeviceStatistics(Record, kw_only=True):
    """Device time of the iterations. The statistics are null without iterations."""

    iterations: Count
    cold_ns: Annotated[
        int | None,
        note("first iteration after the load, if it was the first; excluded from statistics unless it is the only one"),
    ] = None
    p50_ns: float | None = None
    p90_ns: float | None = None
    min_ns: float | None = None
    mean_ns: float | None = None
    stdev_ns: float | None = None
    samples_ns: Samples = []

    @property
    def is_cold_only(self) -> bool:
        """True if there was only one iteration, which was the first after the load."""
        return self.iterations == 1 and self.cold_ns is not None

    @property
    def warm_ns(self) -> list[int]:
        """Samples for the statistics: all iterations except a cold one.

        A cold iteration counts only if it is the only one.
        """
        return self.samples_ns[1 if self.cold_ns is not None and self.iterations > 1 else 0 :]


class StoredAnswer(Record, kw_only=True):
    """Outputs that multiple iterations returned."""

    iterations: Annotated[int, Meta(ge=1)]
    share: Annotated[float, Meta(gt=0, le=1)]
    first: Annotated[Count, note("first iteration with these outputs")]
    verdict: Annotated[StoredVerdict | UnsetType, note("verdict of differing outputs, from the first reference")] = (
        UNSET
    )


class StoredRepetition(Record, kw_only=True):
    """Iterations compared on the board, including warm-up and profiled iterations."""

    iterations: Annotated[int, Meta(ge=1)]
    distinct: Annotated[int, note("number of different output sets; a lower bound if `others` is not 0", ge=1)]
    sampled: Annotated[bool, note("outputs above 1 MiB are compared in blocks")]
    others: Annotated[Count, note("iterations with outputs that are not in `answers`, because the list is full")]
    differing: Annotated[list[str], note("names of outputs that differ")]
    answers: Annotated[list[StoredAnswer], note("the different output sets, in the order in which they first appeared")]
    worst: Annotated[Count | None, note("index in `answers` of the outputs with the largest error")] = None
    text: str


class StoredCompilations(Record, kw_only=True):
    """Programs of --recompile."""

    count: Annotated[int, Meta(ge=2)]
    programs: Annotated[int, note("number of different programs", ge=1)]
    digests: Annotated[list[dict[str, str]], note("files of each program that differs from the first")]
    text: str


class StoredClock(Record, kw_only=True):
    """The board's clock, relative to the host's."""

    offset_ns: float
    drift: float
    error_ns: float


class StoredCommand(Record, kw_only=True):
    """Command that ran the program on a board without an agent."""

    line: str
    wall_s: Annotated[list[float], note("host time per command, without whole seconds of waiting for other runs")]
    why: Annotated[str, note("reason why the board has no agent")]
    not_measured: list[str]


class StoredProvenance(Record, kw_only=True):
    """Board, runtime and conditions of the measurement."""

    board: str = ""
    board_id: str = ""
    machine: dict[str, Any] = {}
    readings: list[dict[str, Any]] = []
    simulated: list[str] = []
    stack: Annotated[
        list[StackPart], note("driver, firmware and other parts; empty in records of earlier versions")
    ] = []
    agent_version: str = ""
    runtime: str = ""
    runtime_version: str = ""
    device: str = ""
    notes: Annotated[list[str], note("events on the board, such as throttling or a clock change")] = []
    finished_at: Annotated[float, note("seconds since the epoch")] = 0.0
    arithmetic: Annotated[str | UnsetType, note("known arithmetic: declared, or float32 of an exact simulator")] = UNSET
    placement: Annotated[Placement | UnsetType, note("absent if the runtime does not report it")] = UNSET
    elsewhere: Annotated[str | UnsetType, note("parts that ran on a device that was not requested")] = UNSET
    clock: StoredClock | UnsetType = UNSET
    command: StoredCommand | UnsetType = UNSET
    host_key: Annotated[str | UnsetType, note("with SSH: fingerprint of the host key, SHA256:...")] = UNSET


class StoredReference(Record, kw_only=True):
    """Outputs of a reference."""

    source: str
    relation: RelationName = Relation.INDEPENDENT
    provenance: Annotated[dict[str, Any], note("`reference`, `version`, `cached`, or files of `expected` outputs")]
    outputs: list[StoredTensor]


class StoredJudging(Record, kw_only=True):
    """Settings that judge a case. A bundle or a trace can override those of the command."""

    rtol: float | None = None
    atol: float | None = None
    replace_blind_tolerance: Annotated[bool, note("true: outputs that the tolerance cannot judge get the default")]
    accept: Annotated[list[str], note("criteria that replace the tolerance")] = []


class RunCase(Record, kw_only=True):
    """Case of a run."""

    name: str
    path: str
    outcome: Annotated[Outcome | None, note("null if the case has not ended")]
    stage: Annotated[str, note("last stage that started")]
    reason: Annotated[str, note("reason in one line; empty for a pass")]
    error: CaseError | None
    model: StoredModel | None
    artifact: StoredArtifact | None
    timings: StageTimes
    cached: Annotated[list[CachedStage], note("stages whose result was cached")] = []
    pushed_bytes: Count = 0
    device: DeviceStatistics | None
    instructions: Annotated[
        InstructionStatistics | None, note("null without --instructions, unless the board's clock counts instructions")
    ] = None
    conditions: Annotated[
        Conditions | None, note("of the board; null if the run did not measure times, or in bench.json")
    ] = None
    grade: Annotated[MeasurementGrade | None, note("of the times; null if no grade, or in bench.json")] = None
    energy: Annotated[EnergyMeasurement | None, note("null without --energy, or in bench.json")] = None
    generation: Annotated[StoredGeneration | None, note("null without --generate, or if nothing ran")] = None
    generation_digest: Annotated[
        str, note("digest of the models, tokens and settings of --generate; empty without --generate")
    ] = ""
    repetition: Annotated[StoredRepetition | None, note("null if iterations were not compared")] = None
    compilations: StoredCompilations | None = None
    peak_memory_bytes: Annotated[Count | None, note("of the worker process; null if unknown")] = None
    peak_device_memory_bytes: Annotated[
        Count | None, note("of the device; null if neither the runtime nor the driver reports it")
    ] = None
    provenance: Annotated[StoredProvenance | None, note("null if nothing ran")]
    inputs: list[StoredTensor]
    outputs: list[StoredTensor]
    references: list[StoredReference]
    unanswered: Annotated[list[FailedReference], note("references that gave no result")] = []
    verdicts: list[StoredVerdict]
    judging: Annotated[StoredJudging | None, note("null in records of earlier versions")] = None
    decided_by: Annotated[str, note("reference that a pass is based on, with its relation; otherwise empty")] = ""
    disagreement: Annotated[str, note("disagreement between references, or empty")] = ""
    random: Annotated[list[str], note("nodes with random numbers that outputs depend on")] = []
    worker_log: list[str]
    profiles: list[ProfileDirectory] = []


class RunBoard(Record, kw_only=True):
    """Board of a run."""

    name: str
    hw_type: str
    info: Annotated[
        dict[str, Any], note("message DescribeReply of protos/hil/v1/agent.proto, with 64-bit numbers as strings")
    ]


class SmallestFailing(Record, kw_only=True):
    """Smallest sizes at which a model fails."""

    model: str
    dims: dict[str, Count]
    case: str
    outcome: Outcome


class NamedCase(Record, kw_only=True):
    """Name of a case."""

    name: str


class NamedBoard(Record, kw_only=True):
    """Name of a board."""

    name: Annotated[str, note("absent in earlier versions if the board is unknown")] = ""


class RunHead(Record, kw_only=True):
    """Fields that run.json and matrix.json have in common, for lists of runs."""

    created: float
    origin: Origin | None = None
    board: NamedBoard | None
    cases: list[NamedCase]
    outcome: str | None
    exit_code: int | None
    finished: bool


class RunRecord(Record, kw_only=True):
    """Record of a run."""

    schema: Literal[1]
    id: str
    created: Annotated[float, note("seconds since the epoch")]
    origin: Origin | None = None
    request: Annotated[dict[str, Any], note("options of the command, for --resume")]
    command: Annotated[str | UnsetType, note("command that repeats the run, if the request does not define it")] = UNSET
    board: RunBoard | None
    smallest_failing: Annotated[
        list[SmallestFailing] | UnsetType, note("with a range of sizes: smallest failing sizes per model")
    ] = UNSET
    cases: list[RunCase]
    consoles: Annotated[list[StoredConsole], note("consoles of the boards")] = []
    outcome: Annotated[Outcome | None, note("outcome of the worst case; null if not finished")]
    exit_code: int | None
    finished: bool
    folder: Annotated[str | UnsetType, note("directory of the run, or empty; printed, not stored in run.json")] = UNSET


def make_run(values: Any) -> RunRecord:
    """Convert run.json to a record. Raises UsageError.

    Before version 0.1, an unknown board and the provenance of a case that did not run were empty objects.
    """
    if isinstance(values, dict) and isinstance(values.get("cases"), list):
        cases = [_upgrade_case(one) for one in values["cases"]]
        values = {**values, "board": values.get("board") or None, "cases": cases}
    return make_record(values, RunRecord)


def make_run_case(values: Any) -> RunCase:
    """Convert a case of run.json to a record. Raises UsageError."""
    return make_record(_upgrade_case(values), RunCase)


def _upgrade_case(values: Any) -> Any:
    return {**values, "provenance": values.get("provenance") or None} if isinstance(values, dict) else values
