"""Records of a suite run: suite.json, and a line of results.jsonl for every finished case."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType

from hil.controller.records.base import Count, Record, Samples, Timestamp, make_record, note
from hil.controller.records.console import ConsoleQuoteRecord, StoredConsole
from hil.controller.records.decisions.triage import TriageResult
from hil.controller.records.measurements.conditions import Conditions, MeasurementGrade
from hil.controller.records.measurements.energy import EnergyMeasurement
from hil.controller.records.measurements.generation import StoredGeneration
from hil.controller.records.outputs import FailedReference, Origin, Placement, StoredComparison


class SuiteModelFile(Record, kw_only=True):
    """File of a model before the flow's recipe."""

    path: str
    digest: Annotated[str, note("including the external data")]


class SuiteRecord(Record, kw_only=True):
    """A suite run without its cases: suite.json."""

    schema: Literal[1]
    id: str
    request: Annotated[dict[str, Any], note("options of the command, for --resume; without `source` for pytest")] = {}
    source: Annotated[str, note("the suite as given")]
    place: Annotated[
        str | UnsetType, note("absolute path of the source; empty for hil's suites; absent for pytest")
    ] = UNSET
    suite: str
    flow: str
    runtime: str
    boards: list[str]
    board_info: Annotated[dict[str, dict[str, Any]], note("board -> its description, as in run.json")] = {}
    command: Annotated[str, note("command that resumes the run")]
    versions: Annotated[dict[str, str], note("tool -> version")]
    ids: Annotated[list[str], note("selected cases, in order")]
    suite_ids: Annotated[list[str], note("all cases of the suite")]
    models: dict[str, SuiteModelFile] = {}
    expected: Annotated[str | None, note("file of expected failures")]
    origin: Origin | None = None
    consoles: Annotated[list[StoredConsole], note("consoles of the boards")] = []
    left_out: Annotated[list[str], note("test cases of the models that cannot be run, a line for each place")] = []
    interrupted: bool
    started: Timestamp
    finished: Timestamp | None
    exit_code: Annotated[int | None, note("null until the run has finished")]


class OtherReference(Record, kw_only=True):
    """Result of a reference after the first."""

    against: str
    relation: str = ""
    outcome: str = ""
    outputs: list[StoredComparison] = []


class CaseRecord(Record, kw_only=True):
    """Record of a finished case."""

    id: str
    model: str
    suite: str
    flow: str
    runtime: str
    outcome: Annotated[str, note("outcome, with expected failures applied")]
    ended: Annotated[str, note("outcome without expected failures")]
    layer: Annotated[str, note("empty for the whole model")] = ""
    op: str = ""
    params: dict[str, str] = {}
    board: Annotated[str, note("board that ran the case, or empty")] = ""
    hw_type: str = ""
    stage: str = ""
    message: Annotated[str, note("reason in one line; empty for a pass")] = ""
    hint: Annotated[str, note("suggested next step")] = ""
    detail: Annotated[str, note("error output of the tool")] = ""
    console: Annotated[list[ConsoleQuoteRecord], note("lines of the board's console that explain the error")] = []
    timings: Annotated[dict[str, float | None], note("seconds per stage, on the host's clock")] = {}
    device_p50_ns: Annotated[float | None, note("median device time of an iteration")] = None
    device_p90_ns: Annotated[float | None, note("90th percentile of the device time")] = None
    samples_ns: Annotated[Samples, note("device time of each iteration, without a cold one if there are others")] = []
    iterations: Annotated[Count, note("timed iterations")] = 0
    cold: Annotated[bool, note("true if only the first run after the load was timed")] = False
    conditions: Annotated[Conditions | None, note("of the board; null if the case did not measure times")] = None
    grade: Annotated[MeasurementGrade | None, note("of the times; null without a grade")] = None
    energy: Annotated[EnergyMeasurement | None, note("null without --energy")] = None
    generation: Annotated[StoredGeneration | None, note("null for a case without a prompt")] = None
    answers: Annotated[str, note("result of comparing iterations; empty for fewer than two")] = ""
    agentless: Annotated[str, note("reason why the board has no agent, or empty")] = ""
    artifact_bytes: Annotated[Count | None, note("size of the program's files")] = None
    function: Annotated[str, note("function of the program, or empty")] = ""
    program: Annotated[str, note("digest of the program's main file; equal for programs compiled together")] = ""
    compiler: Annotated[str, note("name and version, `none`, or empty if unknown")] = ""
    flags: Annotated[list[str], note("compiler flags, including those of the board config")] = []
    cached: Annotated[bool | None, note("null if nothing was compiled")] = None
    notes: Annotated[dict[str, Any], note("notes from the compiler, such as a program's delegation")] = {}
    placement: Placement = None
    elsewhere: Annotated[str, note("parts that ran on a device that was not requested, or empty")] = ""
    outputs: Annotated[list[StoredComparison], note("comparison of each output with the flow's reference")] = []
    against: Annotated[str, note("name of that reference")] = ""
    relation: Annotated[str, note("components that it shares with the program; empty without a reference")] = ""
    decided_by: Annotated[str, note("reference that a pass is based on, with its relation; otherwise empty")] = ""
    unanswered: Annotated[list[FailedReference], note("references that gave no result")] = []
    other_references: list[OtherReference] = []
    disagreement: Annotated[str, note("disagreement between references, or empty")] = ""
    random: Annotated[list[str], note("nodes with random numbers that outputs depend on")] = []
    plain_outputs: Annotated[
        list[StoredComparison], note("comparison with the model before the flow's recipe; empty without a recipe")
    ] = []
    plain_against: str = ""
    expectation: Annotated[dict[str, str], note("expected failure: `outcome`, `reason`, `issue`; or empty")] = {}
    triage: Annotated[
        TriageResult, note("result of --known: `known` and `wontfix` do not count as failures; empty without an entry")
    ] = ""
    attempts: Annotated[
        list[dict[str, str]], note("earlier attempts and confirmation runs: `why`, `board`, `outcome`, `message`")
    ] = []
    confirmed: Annotated[str, note("result of confirmation runs: always wrong, flaky, one bad board; or empty")] = ""
    repeat: Annotated[str, note("command that repeats the case")] = ""
    diff: Annotated[str, note("command that shows the difference of the worst output, or empty")] = ""
    folder: Annotated[str, note("directory of tensors and logs, relative to the run; or empty")] = ""
    directories: Annotated[
        dict[str, str], note("other directories: `ir`, `run profile`, `compile profile`; relative to the run")
    ] = {}
    started: Annotated[float, note("seconds since the epoch")] = 0.0
    content: Annotated[str, note("digest of the case's definition")] = ""


class SuiteDocument(SuiteRecord, kw_only=True):
    """A suite run with its cases, as `hil suite run --json` prints it."""

    folder: Annotated[str, note("directory of the run")]
    cases: list[CaseRecord]


def make_suite(values: Any) -> SuiteDocument:
    """Convert a printed suite run to a record. Raises UsageError."""
    if isinstance(values, dict) and isinstance(values.get("cases"), list):
        values = {**values, "cases": [_upgrade_case(one) for one in values["cases"]]}
    return make_record(values, SuiteDocument)


def make_case_record(values: Any) -> CaseRecord:
    """Convert a line of results.jsonl to a record. Raises UsageError."""
    return make_record(_upgrade_case(values), CaseRecord)


def _upgrade_case(values: Any) -> Any:
    """Rename the key of ``directories``, which was ``left`` before version 0.1."""
    if isinstance(values, dict) and "left" in values:
        return {"directories": values["left"], **values}
    return values
