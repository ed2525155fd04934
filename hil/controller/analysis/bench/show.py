"""Show the record of a bench in the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from hil.controller.pipeline.instructions import format_counts
from hil.controller.pipeline.records.energy_text import MIN_EFFECT, format_energy, format_power, format_token_energy
from hil.controller.pipeline.records.print_generation import describe_times
from hil.controller.records.measurements.bench import (
    BenchRecord,
    BenchTimes,
    SideRecord,
    SpeedComparison,
    SustainedTimes,
)
from hil.controller.records.measurements.conditions import ConditionReading, Conditions, Settling
from hil.controller.records.measurements.energy import EnergyComparison
from hil.controller.records.measurements.instructions import InstructionComparison
from hil.controller.records.outputs import format_placement
from hil.controller.storage.screen.texts import (
    format_joules,
    format_seconds,
    keep_together,
    keep_units,
    make_table,
    show,
)
from hil.core.results import Outcome

if TYPE_CHECKING:
    from rich.console import Console

_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {"PASS": "green", "FAIL": "red", "UNSTABLE": "red", "SKIP": "yellow"}
_VERDICTS = {"no difference": "green", "faster": "green", "slower": "red"}
_INSTRUCTIONS = {"equal": "green", "fewer": "green", "more": "red", "unclear": "yellow"}
_ENERGIES = {"equal": "green", "less": "green", "more": "red"}
_Cell = Callable[[SideRecord], str]


def print_bench(console: Console, record: BenchRecord) -> None:
    """Print the measurements, and compare two programs."""
    from rich.text import Text

    for side in record.sides:
        outcome = side.outcome.value if side.outcome else "UNFINISHED"
        line = Text(outcome, style=f"bold {_COLOURS.get(outcome, 'magenta')}")
        where = " ".join(filter(None, (side.runtime, side.runtime_version)))
        line.append(f"  {side.name}", style="bold default")
        line.append(f"  {where} on {side.board}" if side.board else "", style="default")
        line.append(f"  {_format_check(side)}", style="dim")
        console.print(line, soft_wrap=True)
    groups: dict[str, list[SideRecord]] = {}
    for side in record.sides:
        groups.setdefault(side.generation.prompt if side.generation else "", []).append(side)
    for sides in groups.values():
        _print_sides(console, sides)
    _print_notes(console, record)
    for reason in record.not_comparable:
        line = Text("not comparable", style="bold red").append(f"  {reason}", style="default")
        console.print(line, soft_wrap=True)
    if record.comparison:
        _print_comparison(console, record.comparison)
    if record.instructions:
        _print_instructions(console, record.instructions)
    if record.energy:
        _print_energy(console, record.energy)
    for prompt in record.prompts:
        for what, found in (("prefill", prompt.prefill), ("TTFT", prompt.ttft), ("TPOT", prompt.tpot)):
            if found:
                _print_comparison(console, found, f"{prompt.prompt}, {what}: ")
        if prompt.energy:
            _print_energy(console, prompt.energy, f"{prompt.prompt}, energy: ")
    if record.folder:
        console.print(f"stored in {record.folder}", markup=False, highlight=False, soft_wrap=True)


def _print_sides(console: Console, sides: Sequence[SideRecord]) -> None:
    from rich.text import Text

    times = [dict(_describe_tokens(side)) for side in sides]
    tokens = [(label, [one.get(label, "") for one in times]) for label in dict.fromkeys(itertools.chain(*times))]
    title, *others = [(label, list(map(cell, sides))) for label, cell in _ROWS]
    rows = [
        (Text(label, "dim", no_wrap=True), *map(keep_units, texts))
        for label, texts in (title, *tokens, *(others[_FIRST_COMMON:] if tokens else others))
        if any(texts)
    ]
    shown = make_table([""] * (1 + len(sides)), rows)
    shown.columns[0].no_wrap = True  # do not wrap labels
    show(console, shown)


def _describe_tokens(side: SideRecord) -> Iterator[tuple[str, str]]:
    """Yield labels and texts about the times of a decoder's tokens."""
    found = side.generation
    if found is not None and found.times is not None:
        for label, parts in describe_times(found.times, found.depths, found.bound):
            yield label, ", ".join(map(keep_together, parts))


def time_text(nanoseconds: float) -> str:
    """Format a time with three digits and a unit: ``59.5 us``."""
    return format_seconds(nanoseconds / 1e9)


def draw_bars(values: Sequence[float]) -> str:
    """Return values as a bar chart in a line. The lowest value has the shortest bar."""
    if not values:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in values)


def _format_check(side: SideRecord) -> str:
    if side.outcome is Outcome.PASS:
        return "; ".join(filter(None, (f"as {' and '.join(side.against)}", side.reason)))
    return side.reason


def _blank_unless_measured(cell: Callable[[SideRecord, BenchTimes], str]) -> _Cell:
    return lambda side: cell(side, side.times) if side.times else ""


def _format_times(*names: str) -> _Cell:
    return _blank_unless_measured(lambda _, times: ", ".join(time_text(getattr(times, f"{name}_ns")) for name in names))


def format_median(times: BenchTimes) -> str:
    """Return the median with its interval: ``110 us (99%: 95.5 us to 121 us)``."""
    text, interval = time_text(times.p50_ns), times.median
    if interval:
        text += f" ({interval.level:.0%}: {time_text(interval.low)} to {time_text(interval.high)})"
    return text


def _format_histogram(side: SideRecord) -> str:
    found = side.histogram
    return f"{time_text(found.low_ns)} {draw_bars(found.counts)} {time_text(found.high_ns)}" if found else ""


def _format_course(side: SideRecord, times: BenchTimes) -> str:
    if side.sustained:
        return draw_bars([window.p50_ns for window in side.sustained.windows])
    drift = times.drift
    text = "" if drift is None else "no drift"
    if drift and drift.marked:
        text = f"DRIFT: {abs(drift.change):.1%} {'slower' if drift.change > 0 else 'faster'} by the end"
    return f"{draw_bars(side.course_ns)} {text}".strip()


def format_sustained(found: SustainedTimes) -> str:
    """Return when throttling begins: ``throttles after 12.3 s: 2.1 ms to 4.2 ms (EVENT)``."""
    start = found.throttling
    if start is None:
        change = f"{time_text(found.first_ns)} to {time_text(found.last_ns)}"
        return f"steady for {keep_together(format_seconds(found.measured_s))}: {change}"
    change = (
        f"{keep_together(format_seconds(start.start_s))}: {time_text(start.before_ns)} to {time_text(start.after_ns)}"
    )
    return f"throttles after {change} ({start.event})" if start.event else f"slower after {change}"


def _format_outliers(_: SideRecord, times: BenchTimes) -> str:
    return f"{times.outliers} of {times.iterations}, above {time_text(times.outlier_above_ns)}"


def _is_measured(side: SideRecord) -> bool:
    return side.times is not None or side.clock == "icount"


def _format_memory(side: SideRecord) -> str:
    if not _is_measured(side):
        return ""
    found = side.peak_memory_bytes
    if found is None:
        return "unknown"
    return f"{found / 1e6:.1f} MB" if found >= 1e6 else f"{found / 1e3:.1f} kB"  # microcontrollers have little RAM


def _format_device_memory(side: SideRecord) -> str:
    return "" if side.peak_device_memory_bytes is None else f"{side.peak_device_memory_bytes / 1e6:.3f} MB"


def _format_parallelism(side: SideRecord, _: BenchTimes) -> str:
    return "unknown" if side.parallelism is None else f"{side.parallelism:.2f} cores"


def _format_conditions(found: Conditions) -> str:
    """Format temperatures, other load and memory pressure, as far as the board reports them."""
    texts = [_format_reading(one) for one in found.readings if one.unit == "degC"][:1]
    clocks = [one for one in found.readings if one.unit == "MHz" and one.median is not None]
    texts += [f"{max(one.median or 0.0 for one in clocks):.0f} MHz"] if clocks else []
    texts += [f"other load {found.other_load:.1f} of {found.cores} cores"] if found.other_load is not None else []
    texts += [f"memory pressure {found.memory_pressure:.0f} %"] if (found.memory_pressure or 0.0) >= 1 else []
    return ", ".join(map(keep_together, texts))


def _format_settling(found: Settling) -> str:
    waited = keep_together(format_seconds(found.waited_s))
    return f"after {waited}" if found.steady else f"NOT STEADY after {waited}: {', '.join(found.unsteady)}"


def _format_reading(reading: ConditionReading) -> str:
    values = [one for one in (reading.before, reading.low, reading.high, reading.after) if isinstance(one, float)]
    low, high = min(values), max(values)
    return f"{low:.0f} C" if round(low) == round(high) else f"{low:.0f} to {high:.0f} C"


def _format_stages(*names: str) -> _Cell:
    def describe(side: SideRecord) -> str:
        spent = {name: getattr(side.timings, f"{name}_s") for name in names}
        texts = [
            f"{name.replace('_', ' ')} {format_seconds(value)}" for name, value in spent.items() if value is not None
        ]
        return ", ".join(map(keep_together, texts))

    return describe


_ROWS: tuple[tuple[str, _Cell], ...] = (
    ("", lambda side: f"{side.label}: {side.name}" if side.name[:2] in ("A-", "B-") else ""),
    ("p50", _blank_unless_measured(lambda _, times: format_median(times))),
    ("p10, p90, p99", _format_times("p10", "p90", "p99")),
    ("min, max", _format_times("min", "max")),
    ("mean, stdev", _format_times("mean", "stdev")),
    ("spread to p99", _format_histogram),
    ("course", _blank_unless_measured(_format_course)),
    ("sustained", lambda side: format_sustained(side.sustained) if side.sustained else ""),
    ("outliers", _blank_unless_measured(_format_outliers)),
    ("ran on", lambda side: format_placement(side.placement)),
    ("instructions", lambda side: format_counts(side.instructions) if side.instructions else ""),
    ("grade", lambda side: side.grade.title if side.grade else ""),
    ("conditions", lambda side: _format_conditions(side.conditions) if side.conditions else ""),
    ("settled", lambda side: _format_settling(side.settling) if side.settling else ""),
    ("iterations", _blank_unless_measured(lambda side, _: f"{side.iterations_per_s:.4g} a second")),
    (
        "answers",
        lambda side: (side.repetition.text if side.repetition else "not compared") if _is_measured(side) else "",
    ),
    ("energy", lambda side: format_energy(side.energy) if side.energy else ""),
    ("energy of tokens", lambda side: format_token_energy(side.energy) if side.energy else ""),
    ("power", lambda side: format_power(side.energy) if side.energy else ""),
    ("peak memory", _format_memory),
    ("of the device", _format_device_memory),
    ("parallelism", _blank_unless_measured(_format_parallelism)),
    ("on the board", _format_stages("first_run", "warmup", "steady")),
    ("on the host", _format_stages("import", "compile", "push", "load", "fetch")),
)
# The first row after the title that also applies to whole generations.
_FIRST_COMMON = [label for label, _ in _ROWS].index("ran on") - 1


def _print_notes(console: Console, record: BenchRecord) -> None:
    for side in record.sides:
        for label, text in (("note", side.elsewhere), ("hint", side.hint)):
            if text:
                console.print(f"{label}: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for side in record.sides:
        if side.grade is not None and side.grade.reasons and not record.not_comparable:
            text = f"grade {side.grade.grade} of {side.name}: {'; '.join(side.grade.reasons)}"
            console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if any(side.clock == "icount" for side in record.sides):
        text = "no times: the clock of this emulated board counts instructions"
        console.print(text, style="yellow", soft_wrap=True)
    if any(side.clock == "host" for side in record.sides):
        console.print(
            "host time: this board does not report device times; each iteration includes a process start",
            style="yellow",
            soft_wrap=True,
        )
    if record.concurrency > 1:
        console.print(f"{record.concurrency} concurrent copies: times per copy, iterations a second over all copies")
    if not record.finished:
        console.print("interrupted: partial results", style="yellow")


def _print_instructions(console: Console, found: InstructionComparison) -> None:
    from rich.text import Text

    line = Text(found.verdict, style=f"bold {_INSTRUCTIONS[found.verdict]}")
    detail = f"; {found.reason}" * bool(found.reason)
    line.append(
        f"  B executes {found.ratio:.4f} times as many instructions as A "
        f"(differences of at most {found.min_effect:.1%} are ignored{detail})",
        style="default",
    )
    console.print(line, soft_wrap=True)


def _print_energy(console: Console, found: EnergyComparison, title: str = "") -> None:
    from rich.text import Text

    line = Text(title, style="default")
    line.append(f"{found.verdict} energy", style=f"bold {_ENERGIES[found.verdict]}")
    old, new = format_joules(found.old_joules), format_joules(found.new_joules)
    line.append(
        f"  B needs {found.ratio:.3f} times the energy of A ({new} instead of {old}; `equal` if the intervals overlap "
        f"or differ by less than {MIN_EFFECT:.0%})",
        style="default",
    )
    console.print(line, soft_wrap=True)


def _print_comparison(console: Console, found: SpeedComparison, title: str = "") -> None:
    from rich.text import Text

    interval = found.interval
    line = Text(title, style="default")
    line.append(found.verdict, style=f"bold {_VERDICTS[found.verdict]}")
    line.append(
        f"  without disturbances, B takes {found.ratio:.3f} times as long as A ({interval.level:.0%}: "
        f"{interval.low:.3f} to {interval.high:.3f}, {found.rounds} rounds; "
        f"differences below {found.min_effect:.1%} are ignored)",
        style="default",
    )
    console.print(line, soft_wrap=True)
