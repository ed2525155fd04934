"""A bench document as text for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hil.controller.storage.screen.texts import seconds, show, table, together, units
from hil.core.results import placement_text

if TYPE_CHECKING:
    from rich.console import Console

_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {"PASS": "green", "FAIL": "red", "UNSTABLE": "red", "SKIP": "yellow"}
_VERDICTS = {"no difference": "green", "faster": "green", "slower": "red"}
_Cell = Callable[[Mapping[str, Any]], str]


def print_bench(console: Console, document: Mapping[str, Any]) -> None:
    """Print the measurements, and compare two programs."""
    from rich.text import Text

    sides, rows = document["sides"], []
    for label, is_timed, cell in _ROWS:
        texts = ["" if is_timed and not side["times"] else cell(side) for side in sides]
        if any(texts):
            rows.append((Text(label, "dim", no_wrap=True), *map(units, texts)))
    for side in sides:
        outcome = side["outcome"] or "UNFINISHED"
        line = Text(outcome, style=f"bold {_COLOURS.get(outcome, 'magenta')}")
        where = " ".join(str(side[key]) for key in ("runtime", "runtime_version") if side[key])
        line.append(f"  {side['name']}", style="bold default")
        line.append(f"  {where} on {side['board']}" if side["board"] else "", style="default")
        line.append(f"  {_format_check(side)}", style="dim")
        console.print(line, soft_wrap=True)
    shown = table([""] * (1 + len(sides)), rows)
    shown.columns[0].no_wrap = True  # do not wrap labels
    show(console, shown)
    _print_notes(console, document)
    if document["comparison"]:
        _print_comparison(console, document["comparison"])
    if document["folder"]:
        console.print(f"stored in {document['folder']}", markup=False, highlight=False, soft_wrap=True)


def time_text(nanoseconds: float) -> str:
    """Format a time with three digits and a unit: ``59.5 us``."""
    return seconds(nanoseconds / 1e9)


def bars(values: Sequence[float]) -> str:
    """Return values as a bar chart in a line. The lowest value has the shortest bar."""
    if not values:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in values)


def _format_check(side: Mapping[str, Any]) -> str:
    if side["outcome"] == "PASS":
        return "; ".join(filter(None, (f"as {' and '.join(side['against'])}", side["reason"])))
    return str(side["reason"])


def _format_times(*keys: str) -> _Cell:
    return lambda side: ", ".join(time_text(side["times"][f"{key}_ns"]) for key in keys)


def _format_median(side: Mapping[str, Any]) -> str:
    text, interval = time_text(side["times"]["p50_ns"]), side["times"]["median"]
    if interval:
        text += f" ({interval['level']:.0%}: {time_text(interval['low'])} to {time_text(interval['high'])})"
    return text


def _format_histogram(side: Mapping[str, Any]) -> str:
    found = side["histogram"]
    return f"{time_text(found['low_ns'])} {bars(found['counts'])} {time_text(found['high_ns'])}"


def _format_course(side: Mapping[str, Any]) -> str:
    drift = side["times"]["drift"]
    text = "" if drift is None else "no drift"
    if drift and drift["marked"]:
        text = f"DRIFT: {abs(drift['change']):.1%} {'slower' if drift['change'] > 0 else 'faster'} by the end"
    return f"{bars(side['course_ns'])} {text}".strip()


def _format_outliers(side: Mapping[str, Any]) -> str:
    times = side["times"]
    return f"{times['outliers']} of {times['iterations']}, above {time_text(times['outlier_above_ns'])}"


def _format_optional(key: str, text: Callable[[float], str]) -> _Cell:
    return lambda side: "unknown" if side[key] is None else text(side[key])


def _format_stages(*names: str) -> _Cell:
    def describe(side: Mapping[str, Any]) -> str:
        spent = {name: side["timings"][f"{name}_s"] for name in names}
        texts = [f"{name.replace('_', ' ')} {seconds(value)}" for name, value in spent.items() if value is not None]
        return ", ".join(map(together, texts))

    return describe


# Label, a flag for rows that need iteration times, and the text.
_ROWS: tuple[tuple[str, bool, _Cell], ...] = (
    ("", False, lambda side: f"{side['label']}: {side['name']}" if side["name"][:2] in ("A-", "B-") else ""),
    ("p50", True, _format_median),
    ("p10, p90, p99", True, _format_times("p10", "p90", "p99")),
    ("min, max", True, _format_times("min", "max")),
    ("mean, stdev", True, _format_times("mean", "stdev")),
    ("spread to p99", True, _format_histogram),
    ("course", True, _format_course),
    ("outliers", True, _format_outliers),
    ("ran on", False, lambda side: placement_text((part["device"], part["nodes"]) for part in side["placement"] or ())),
    ("iterations", True, lambda side: f"{side['iterations_per_s']:.4g} a second"),
    ("answers", True, lambda side: side["repetition"]["text"] if side["repetition"] else "not compared"),
    ("peak memory", True, _format_optional("peak_memory_bytes", lambda peak: f"{peak / 1e6:.1f} MB")),
    ("parallelism", True, _format_optional("parallelism", lambda cores: f"{cores:.2f} cores")),
    ("on the board", False, _format_stages("first_run", "warmup", "steady")),
    ("on the host", False, _format_stages("import", "compile", "push", "load", "fetch")),
)


def _print_notes(console: Console, document: Mapping[str, Any]) -> None:
    for side in document["sides"]:
        for label, text in (("note", side["elsewhere"]), ("hint", side["hint"])):
            if text:
                console.print(f"{label}: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if any(side["clock"] == "host" for side in document["sides"]):
        console.print(
            "host time: this board does not report device times; each iteration includes a process start",
            style="yellow",
            soft_wrap=True,
        )
    if document["concurrency"] > 1:
        console.print(
            f"{document['concurrency']} concurrent copies: times per copy, iterations a second over all copies"
        )
    if not document["finished"]:
        console.print("interrupted: partial results", style="yellow")


def _print_comparison(console: Console, found: Mapping[str, Any]) -> None:
    from rich.text import Text

    interval = found["interval"]
    line = Text(found["verdict"], style=f"bold {_VERDICTS[found['verdict']]}")
    line.append(
        f"  undisturbed, B takes {found['ratio']:.3f} times as long as A ({interval['level']:.0%}: "
        f"{interval['low']:.3f} to {interval['high']:.3f}, {found['rounds']} rounds; "
        f"differences below {found['min_effect']:.1%} are ignored)",
        style="default",
    )
    console.print(line, soft_wrap=True)
