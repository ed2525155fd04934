"""Records of a bench: bench.json of `hil bench`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from hil.controller.records.base import Count, Interval, Record, note
from hil.controller.records.measurements.conditions import Conditions, MeasurementGrade, Settling
from hil.controller.records.measurements.energy import EnergyComparison, EnergyMeasurement
from hil.controller.records.measurements.generation import GenerationTimes
from hil.controller.records.measurements.instructions import InstructionComparison, InstructionStatistics
from hil.controller.records.outputs import Origin, Placement
from hil.controller.records.run import Seconds, StoredRepetition, StoredSpec
from hil.core.results import Outcome

SideLabel = Literal["A", "B"]
SpeedVerdict = Literal["no difference", "faster", "slower"]


class Drift(Record, kw_only=True):
    """A trend in iteration times during the measurement."""

    change: Annotated[
        float, note("from first to last, relative to the median, by the robust slope; 0.02 is 2 % slower")
    ]
    p_value: Annotated[float, note("probability that data without a trend shows such a trend")]
    marked: Annotated[bool, note("true if the trend is significant and large enough to report")]


class BenchTimes(Record, kw_only=True):
    """Statistics of a side's iterations, in nanoseconds."""

    iterations: Annotated[int, Meta(ge=1)]
    p10_ns: float
    p50_ns: float
    p90_ns: float
    p99_ns: float
    min_ns: float
    max_ns: float
    mean_ns: float
    stdev_ns: float
    median: Annotated[Interval | None, note("the median's confidence interval; null with too few iterations")]
    drift: Annotated[Drift | None, note("null with too few iterations")]
    outliers: Annotated[Count, note("iterations longer than `outlier_above_ns`")]
    outlier_above_ns: float


class SustainedWindow(Record, kw_only=True):
    """Times in a part of a sustained measurement."""

    start_s: Annotated[float, note("seconds since the first measured iteration")]
    iterations: Count
    p10_ns: float
    p50_ns: float
    p90_ns: float
    low_mhz: Annotated[float | None, note("lowest frequency of the fastest core; null if unknown")]
    high_mhz: Annotated[float | None, note("highest frequency of the fastest core; null if unknown")]
    high_degc: Annotated[float | None, note("highest temperature of all sensors; null if unknown")]


class ThrottlingStart(Record, kw_only=True):
    """Start of throttling, or of another lasting slowdown."""

    start_s: Annotated[float, note("seconds since the first measured iteration, to within a batch of half a second")]
    event: Annotated[str, note("event of the board, such as throttling; empty if only the times show the slowdown")]
    before_ns: Annotated[float, note("median of the batches before")]
    after_ns: Annotated[float, note("median of the batches after")]


class SustainedTimes(Record, kw_only=True):
    """Times over time, with --sustained."""

    requested_s: float
    measured_s: Annotated[float, note("from the first to the last measured iteration; less after Ctrl-C or an error")]
    iterations: Annotated[Count, note("all measured iterations; `times` and samples.csv have a selection of them")]
    first_ns: Annotated[float, note("median of the first five batches")]
    last_ns: Annotated[float, note("median of the last tenth of the batches")]
    throttling: Annotated[ThrottlingStart | None, note("null without throttling and without a lasting slowdown")]
    windows: list[SustainedWindow]


class SpeedComparison(Record, kw_only=True):
    """Comparison of the speed of B with the speed of A."""

    ratio: Annotated[
        float, note("B's time divided by A's, both without disturbances by other programs: above 1 is slower")
    ]
    interval: Interval
    rounds: Annotated[Count, note("rounds with newly loaded programs that run alternately")]
    min_effect: Annotated[float, note("the smallest relative difference to report")]
    verdict: Annotated[SpeedVerdict, note("B compared with A")]


class SideGeneration(Record, kw_only=True):
    """Prompt of a side, and the times of its tokens."""

    prompt: Annotated[str, note("name of the prompt")]
    prompt_tokens: Annotated[Count, note("tokens of the prompts of all turns")]
    depths: Annotated[list[Count], note("cached tokens before the first and the last step; empty without steps")]
    bound: Annotated[Count | None, note("number of positions in the cache; null if unlimited")]
    times: Annotated[GenerationTimes | None, note("null if nothing was measured")]


class PromptComparison(Record, kw_only=True):
    """Comparison of B with A for a prompt. A comparison is null with too few rounds."""

    prompt: Annotated[str, note("name of the prompt")]
    prefill: Annotated[SpeedComparison | None, note("duration of the prompt's calls")]
    ttft: Annotated[SpeedComparison | None, note("time to first token")]
    tpot: Annotated[SpeedComparison | None, note("median duration of a step's call; null without steps")]
    energy: Annotated[EnergyComparison | None, note("of a generation; null unless both were measured")] = None


class SideTimings(Record, kw_only=True):
    """Times in seconds; null if the step did not run.

    ``first_run_s``, ``warmup_s`` and ``steady_s`` use the side's clock, the others use the host's.
    """

    import_s: Seconds
    compile_s: Seconds
    push_s: Seconds
    load_s: Seconds
    first_run_s: Seconds
    warmup_s: Seconds
    steady_s: Seconds
    fetch_s: Seconds


class TimeHistogram(Record, kw_only=True):
    """Iterations in bins of equal width. The last bin includes all longer iterations."""

    low_ns: float
    high_ns: Annotated[float, note("the 99th percentile")]
    counts: list[Count]


class BenchProgram(Record, kw_only=True):
    """The compiled program in the bench's directory, for --against."""

    runtime: str
    main: str
    digests: dict[str, str]
    function: str
    compiler: str
    flags: list[str]
    folder: Annotated[str, note("relative to the directory of the run")]
    outputs: list[StoredSpec] | None


class SideRecord(Record, kw_only=True):
    """One of the measured programs."""

    label: SideLabel
    name: Annotated[str, note("of the case in run.json")]
    model: str
    from_run: Annotated[str | None, note("argument of --against")]
    board: str | None
    runtime: str | None
    runtime_version: str | None
    device: str | None
    placement: Placement = None
    elsewhere: Annotated[str, note("parts that ran on a device that was not requested, or empty")] = ""
    outcome: Annotated[Outcome | None, note("null if the case has not ended; SKIP if the output was not compared")]
    reason: str
    hint: str
    against: Annotated[list[str], note("references that the output was compared with")]
    clock: Annotated[
        Literal["board", "host", "icount"] | None,
        note(
            "clock of the times; times by the host's clock include a process start; `icount`: no times, because the "
            "board's clock counts instructions; null if nothing was measured"
        ),
    ]
    loads: Annotated[Count, note("how often the program was loaded")]
    warmup: Annotated[Count, note("untimed iterations after each load")]
    timings: SideTimings
    compiled_from_cache: bool
    times: Annotated[BenchTimes | None, note("null, like the histogram, if nothing was measured")]
    histogram: TimeHistogram | None
    course_ns: Annotated[list[float], note("medians during the measurement, in time order")]
    sustained: Annotated[SustainedTimes | None, note("null without --sustained")] = None
    iterations_per_s: Annotated[float, note("of all concurrent copies; 0 without times")]
    instructions: Annotated[
        InstructionStatistics | None,
        note("null without --instructions, unless the board's clock counts instructions"),
    ] = None
    repetition: Annotated[StoredRepetition | None, note("null if iterations were not compared")] = None
    peak_memory_bytes: Count | None
    peak_device_memory_bytes: Annotated[
        Count | None, note("of the device; null if neither the runtime nor the driver reports it")
    ] = None
    parallelism: Annotated[float | None, note("mean number of busy cores; null if the board does not report it")]
    settling: Annotated[Settling | None, note("null without --settle")] = None
    conditions: Annotated[Conditions | None, note("of the board; null if nothing was measured")] = None
    grade: Annotated[MeasurementGrade | None, note("of the times; null if nothing was measured")] = None
    generation: Annotated[SideGeneration | None, note("with --generate; an iteration is a whole generation")] = None
    energy: Annotated[EnergyMeasurement | None, note("null without a meter")] = None
    program: BenchProgram | None


class BenchRecord(Record, kw_only=True):
    """Record of a bench."""

    schema: Literal[1]
    id: str
    folder: Annotated[str, note("directory of bench.json, samples.csv and run.json; empty if discarded")]
    created: Annotated[float, note("seconds since the epoch")]
    origin: Origin | None = None
    finished: Annotated[bool, note("false if the bench still runs, was killed, or was interrupted with Ctrl-C")]
    concurrency: Annotated[int, Meta(ge=1)]
    sides: Annotated[
        list[SideRecord], note("A, or A and B; with --generate, first those of A for each prompt", min_length=1)
    ]
    comparison: Annotated[
        SpeedComparison | None,
        note("null for a single program, with too few rounds, if a side has grade F, or with --generate"),
    ]
    instructions: Annotated[
        InstructionComparison | None, note("null unless the same kind of counter counted two programs")
    ] = None
    energy: Annotated[
        EnergyComparison | None, note("of A and B; null unless the same kind of meter measured both with an interval")
    ] = None
    not_comparable: Annotated[list[str], note("with two programs: why grade F prevents a comparison")] = []
    prompts: Annotated[list[PromptComparison], note("two programs with --generate: a comparison per prompt")] = []
    exit_code: int
