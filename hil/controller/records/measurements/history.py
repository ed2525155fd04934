"""Records of the history: measured cases of stored runs, in order, with the state of the source tree and the board."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from hil.controller.records.base import Count, Number, Record, Timestamp, note
from hil.controller.records.measurements.conditions import MeasurementGrade
from hil.controller.records.measurements.energy import EnergyMeasurement
from hil.controller.records.measurements.instructions import InstructionStatistics
from hil.controller.records.run import Digest, StoredSpec

# Maximum number of samples in an entry.
MAX_SAMPLES = 10_000
Kind = Annotated[str, note("`run`, `bench`, `eval`, `suite`, `study`, or the format of an imported file")]


class SeriesKey(Record, kw_only=True):
    """Identity of a series. Entries with equal keys can be compared.

    The commit, the compiler's version and the flags that a board config adds are not part of the key.
    """

    kind: Kind
    model: Annotated[str, note("path relative to the repository or working directory, or a file name")]
    case: str
    function: str = ""
    board: Annotated[str, note("empty if the case never reached a board")]
    runtime: Annotated[str, note("empty if unknown")]
    flow: Annotated[str, note("of a suite, or empty")] = ""
    flags: Annotated[
        tuple[str, ...], note("flags that the user set: compiler flags, sizes, concurrency, time, metric and dataset")
    ] = ()


class SourceState(Record, kw_only=True):
    """State of the source tree."""

    commit: str = ""
    branch: str = ""
    dirty: Annotated[bool | None, note("true with uncommitted changes; null if unknown")] = None
    labels: list[str] = []


class ToolVersions(Record, kw_only=True):
    """Tools that made and ran the program."""

    compiler: Annotated[str, note("name and version, `none`, or empty if unknown")] = ""
    runtime: Annotated[str, note("version of the runtime, or empty")] = ""
    flags: Annotated[list[str], note("all compiler flags, including those of the board config")] = []
    hil: Annotated[str, note("version of the agent, or empty")] = ""


class MeasuredBoard(Record, kw_only=True):
    """The board's stack, and values that vary between measurements."""

    name: str = ""
    id: Annotated[str, note("identifier of the machine, or empty")] = ""
    device: str = ""
    stack: Annotated[dict[str, str], note("kernel, CPU, libc, governors, firmware and similar facts")] = {}
    parts: Annotated[
        dict[str, str] | None,
        note("versions of driver, firmware and other parts, empty if unknown; null in entries of earlier versions"),
    ] = None
    readings: Annotated[
        dict[str, float], note("clocks in MHz, temperatures in degrees Celsius and other readings")
    ] = {}
    notes: Annotated[list[str], note("events during the measurement, such as throttling")] = []


class AnswerError(Record, kw_only=True):
    """Largest deviation from the reference over all outputs."""

    against: Annotated[str, note("name of the reference")]
    max_abs: Number = None
    rmse: Number = None
    sqnr_db: Number = None
    mismatches: Count | None = None


class EntryScore(Record, kw_only=True):
    """Score of an evaluation."""

    metric: str
    board: Number
    reference: Number
    samples: Annotated[Count, note("number of evaluated samples")]
    is_higher_better: bool
    is_share: Annotated[bool, note("true if the score 1 is 100 %")]


class HistoryNote(Record, kw_only=True):
    """A note on a commit, a run or an entry."""

    commit: Annotated[str, note("commit, or empty")] = ""
    run: Annotated[str, note("ID of a run, or empty")] = ""
    case: Annotated[str, note("case of the run, or empty for all cases")] = ""
    text: str
    created: Timestamp


Confirmation = Literal["", "measured", "drift", "accepted"]


class HistoryEntry(Record, kw_only=True):
    """A measured case of a stored run."""

    key: SeriesKey
    run: Annotated[str, note("ID of the run, bench or suite run; with the case unique in a history")]
    case: Annotated[str, note("name of the case in the run")]
    folder: Annotated[str, note("absolute path of the run when it was added, or empty")] = ""
    created: Annotated[Timestamp, note("time of the measurement, in seconds since the epoch")]
    source: SourceState
    outcome: Annotated[str, note("an outcome; SKIP if the output was not compared")]
    reason: str = ""
    error: Annotated[AnswerError | None, note("null if the output was not compared")] = None
    score: Annotated[EntryScore | None, note("null if the entry is not an evaluation")] = None
    iterations: Annotated[Count, note("number of timed iterations; may exceed the number of samples")] = 0
    clock: Annotated[Literal["board", "host"] | None, note("clock of the times; null without times")] = None
    cold_ns: Annotated[int | None, note("first iteration after the load; not in the samples")] = None
    p50_ns: Annotated[float | None, note("median time of an iteration; null if nothing was measured")] = None
    grade: Annotated[MeasurementGrade | None, note("of the times; null without a grade")] = None
    samples_ns: Annotated[
        list[float], note("times of iterations in order; empty if unknown"), Meta(max_length=MAX_SAMPLES)
    ] = []
    instructions: Annotated[
        InstructionStatistics | None, note("of the iterations; null if not counted; never part of the times")
    ] = None
    energy: Annotated[EnergyMeasurement | None, note("null if it was not measured, or refused")] = None
    peak_memory_bytes: Count | None = None
    program: Annotated[str, note("digest of the program, or empty")] = ""
    program_bytes: Count | None = None
    tools: ToolVersions
    board: MeasuredBoard
    annotations: Annotated[list[HistoryNote], note("notes on the entry, the run and the commit, oldest first")] = []
    confirmed: Annotated[
        Confirmation,
        note(
            "`measured`: a gate found no slower program. `drift`: also compared with the oldest program. `accepted`: a "
            "user accepted the result. Empty: neither"
        ),
    ] = ""


class StoredProgram(Record, kw_only=True):
    """A program in a history: program.json in its directory."""

    digest: Annotated[str, note("digest of the only file, or of the list of files")]
    runtime: str
    main: Annotated[str, note("file to load; the others are its data")]
    files: Annotated[dict[str, Digest], note("name -> digest, in the subdirectory `files`")]
    bytes: Count
    function: str = ""
    compiler: str = ""
    flags: list[str] = []
    outputs: list[StoredSpec] | None = None


class SeriesSummary(Record, kw_only=True):
    """A series, with its newest entry."""

    id: Annotated[str, note("digest of the key")]
    key: SeriesKey
    entries: Count
    created: Annotated[Timestamp, note("time of the newest entry")]
    outcome: Annotated[str, note("of the newest entry")]
    commit: str
    p50_ns: Annotated[float | None, note("newest median; null if no entry has one")]


class SeriesList(Record, kw_only=True):
    """Output of `hil history ls`."""

    history: Annotated[str, note("directory of the history, or URL without login")]
    series: Annotated[list[SeriesSummary], note("sorted by model and case")]


class SeriesChange(Record, kw_only=True):
    """A change of the level of a series."""

    run: Annotated[str, note("first run with the new level")]
    commit: str
    created: Timestamp
    ratio: Annotated[
        float | None, note("median after the change divided by the median before; null unless all values are above 0")
    ]
    before: Annotated[float, note("median before: nanoseconds, a score, or a share in percent")]
    after: Annotated[float, note("median after")]
    p_value: Annotated[float, note("probability of such a change in a series without changes")]


class SeriesHistory(Record, kw_only=True):
    """Output of `hil history show`."""

    id: str
    key: SeriesKey
    entries: Annotated[list[HistoryEntry], note("oldest first")]
    changes: Annotated[list[SeriesChange], note("changes of the median or score, oldest first")]


class AddedEntries(Record, kw_only=True):
    """Output of `hil history add` and `hil history import`."""

    history: Annotated[str, note("directory of the history, or URL without login")]
    added: Annotated[Count, note("new entries, and entries that a later measurement of the same case replaced")]
    present: Annotated[Count, note("entries that the history already had; not changed")]
    programs: Annotated[Count, note("new programs")]
    evicted: Annotated[Count, note("programs deleted because of the quota")]
    skipped: Annotated[list[str], note("cases and programs that were not added, with the reason")]


class AddedAnnotation(Record, kw_only=True):
    """Output of `hil history annotate`."""

    annotation: HistoryNote
    entries: Annotated[Count, note("number of entries that the note applies to")]


class AcceptedEntries(Record, kw_only=True):
    """Output of `hil history accept`."""

    entries: Annotated[Count, note("number of accepted entries")]
