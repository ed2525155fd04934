"""Import results of other tools: Google Benchmark, TFLite's benchmark_model, trtexec and Polygraphy.

==================== =================================================================================================
google-benchmark     JSON of ``--benchmark_format=json`` (``iree-benchmark-module`` writes it, too): the mean of each
                     repetition
benchmark-model      log of ``benchmark_model``: the median, or the mean in logs of earlier versions
trtexec              JSON of ``trtexec --exportTimes``: GPU compute time of each query
polygraphy           JSON of ``polygraphy run --save-outputs``: time of each iteration, on the host's clock
==================== =================================================================================================

The formats do not contain the source state, and most do not contain the model or the board.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any, Literal

from hil.controller.records.measurements.history import (
    MAX_SAMPLES,
    HistoryEntry,
    MeasuredBoard,
    SeriesKey,
    SourceState,
    ToolVersions,
)
from hil.controller.storage.history.store import compute_median_ns
from hil.core.bounded_json import parse_json
from hil.core.digest import digest_of
from hil.core.files import read_file
from hil.errors import UsageError, format_expected

MAX_BYTES = 256 << 20
# Limits for an iteration's time in ns: a picosecond and a year. Other times are not measurements.
_LEAST_NS, _MOST_NS = 1e-3, 3.2e16
_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
# Polygraphy adds a number and the date to names of runners: onnxrt-runner-N0-11/30/26-04:28:45.
_RUNNER_SUFFIX = re.compile(r"-N\d+-\d\d/\d\d/\d\d-\d\d:\d\d:\d\d$")


@dataclass(frozen=True)
class ForeignCase:
    """A measurement in a file.

    Attributes:
        samples_ns: times of the iterations, or means of the repetitions, in ns.
        p50_ns: median in ns, if it differs from the median of the samples.
        created: seconds since the epoch, or None if the file has no date.
    """

    name: str
    samples_ns: list[float]
    iterations: int
    clock: Literal["board", "host"]
    p50_ns: float | None = None
    model: str = ""
    board: str = ""
    runtime: str = ""
    version: str = ""
    reason: str = ""
    created: float | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class ForeignNames:
    """Names that the files do not contain. Empty values are taken from the file, or else from the file's name."""

    model: str = ""
    board: str = ""
    runtime: str = ""


def read_foreign(path: Path, kind: str, names: ForeignNames, source: SourceState) -> list[HistoryEntry]:
    """Read a file of another tool.

    The run ID of the entries is derived from the content, so importing the same file twice adds no entries.

    Args:
        kind: a key of :data:`FORMATS`, or "" to detect the format.

    Raises:
        UsageError: the file is unreadable or invalid. The message names the place.
    """
    try:
        data = read_file(path, MAX_BYTES)
        changed = path.stat().st_mtime
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        kind, cases = parse_foreign(data, kind)
    except _InvalidFile as error:
        raise UsageError(
            f"{path}: {error}", hint="pass the file as the tool wrote it, or select the format with --format"
        ) from error
    run = f"{kind}-{digest_of(data).split(':')[1][:16]}"
    return [_make_entry(case, run, kind, path, changed, names, source) for case in cases]


def parse_foreign(data: bytes, kind: str = "") -> tuple[str, list[ForeignCase]]:
    """Return the format and the cases of a file's content. Raises ValueError with the place of an error."""
    kind = kind or _detect(data)
    cases = list(FORMATS[kind](data))
    if not cases:
        raise _InvalidFile(f"no measurement in this {kind} file")
    numbered: dict[str, int] = {}
    unique = []
    for case in cases:
        count = numbered[case.name] = numbered.get(case.name, 0) + 1
        name = case.name if count == 1 else f"{case.name} {count}"
        unique.append(replace(case, name=name))
    return kind, unique


def _make_entry(
    case: ForeignCase, run: str, kind: str, path: Path, changed: float, names: ForeignNames, source: SourceState
) -> HistoryEntry:
    board = names.board or case.board
    key = SeriesKey(
        kind=kind,
        model=names.model or case.model or path.stem,
        case=case.name,
        board=board or "unknown",
        runtime=names.runtime or case.runtime,
    )
    return HistoryEntry(
        key=key,
        run=run,
        case=case.name,
        folder="",
        created=case.created if case.created is not None else max(changed, 0.0),
        source=source,
        outcome="SKIP",
        reason=case.reason or "output not compared",
        iterations=case.iterations,
        clock=case.clock,
        p50_ns=case.p50_ns if case.p50_ns is not None else compute_median_ns(case.samples_ns),
        samples_ns=case.samples_ns[:MAX_SAMPLES],
        peak_memory_bytes=case.peak_memory_bytes,
        tools=ToolVersions(runtime=case.version),
        board=MeasuredBoard(name=board),
    )


class _InvalidFile(ValueError):
    """A file does not have the format. The message contains the place."""


def _detect(data: bytes) -> str:
    start = data[:4096].lstrip()[:1]
    if start == b"[":
        return "trtexec"
    if start == b"{" and b'"lst"' in data:
        return "polygraphy"
    if start == b"{" and b'"benchmarks"' in data:
        return "google-benchmark"
    if b"Inference timings in us" in data:
        return "benchmark-model"
    raise _InvalidFile(f"unknown format; {format_expected(FORMATS)}")


def _parse(data: bytes) -> Any:
    try:
        return parse_json(data)
    except UnicodeDecodeError as error:
        raise _InvalidFile(f"not UTF-8 at byte {error.start}") from error
    except ValueError as error:
        raise _InvalidFile(f"invalid JSON: {error}") from error


def _require_mapping(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _InvalidFile(f"{place} must be an object, got {_format_value(value)}")
    return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise _InvalidFile(f"{place} must be a list, got {_format_value(value)}")
    return value


def _require_text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise _InvalidFile(f"{place} must be a text, got {_format_value(value)}")
    return value


def _time(value: Any, factor: float, place: str) -> float:
    """Convert a time to nanoseconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _InvalidFile(f"{place} must be a number, got {_format_value(value)}")
    try:
        found = float(value) * factor
    except OverflowError:
        found = math.inf
    if not _LEAST_NS <= found <= _MOST_NS:
        raise _InvalidFile(f"{place} must be a positive time, got {_format_value(value)}")
    return found


def _count(value: Any, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 53:
        raise _InvalidFile(f"{place} must be a positive whole number, got {_format_value(value)}")
    return value


def _format_value(value: Any) -> str:
    return f"{value!r:.60}" if value is None or isinstance(value, (str, int, float)) else type(value).__name__


def _read_google(data: bytes) -> Iterator[ForeignCase]:
    document = _require_mapping(_parse(data), "the file")
    context = _require_mapping(document.get("context", {}), "context")
    created = _parse_date(context.get("date"))
    executable = context.get("executable")
    names: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    failed: dict[str, str] = {}
    for number, row in enumerate(_list(document.get("benchmarks"), "benchmarks")):
        place = f"benchmarks[{number}]"
        row = _require_mapping(row, place)
        if row.get("run_type", "iteration") != "iteration":
            continue  # an aggregate of repetitions
        name = _require_text(row.get("run_name") or row.get("name"), f"{place}.name")
        if row.get("error_occurred") or row.get("skipped"):
            failed[name] = str(row.get("error_message") or row.get("skip_message") or "the benchmark failed")[:300]
            continue
        unit = row.get("time_unit", "ns")
        if not isinstance(unit, str) or unit not in _NS:
            raise _InvalidFile(f"{place}.time_unit must be {format_expected(_NS, '')}, got {_format_value(unit)}")
        names.setdefault(name, []).append(_time(row.get("real_time"), _NS[unit], f"{place}.real_time"))
        counts[name] = counts.get(name, 0) + _count(row.get("iterations", 1), f"{place}.iterations")
    common: dict[str, Any] = {
        "clock": "board",
        "created": created,
        "model": PurePath(executable).name if isinstance(executable, str) else "",
        "board": context["host_name"] if isinstance(context.get("host_name"), str) else "",
        "version": context["library_version"] if isinstance(context.get("library_version"), str) else "",
    }
    for name, samples in names.items():
        yield ForeignCase(name=name, samples_ns=samples, iterations=counts[name], **common)
    for name in failed.keys() - names.keys():
        yield ForeignCase(name=name, samples_ns=[], iterations=0, reason=failed[name], **common)


def _parse_date(value: Any) -> float | None:
    try:
        found = datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    return found if 0 <= found < 1e11 else None


_TIMINGS = re.compile(
    r"Inference timings in us: Init: (\S+), First inference: (\S+), Warmup \(avg\): (\S+), Inference \(avg\): (\S+)"
)
_COUNT = re.compile(r"\bcount=(\d{1,15}) (.*)")
_GRAPH = re.compile(r"Graph: \[(.+?)\]|Loaded model (\S+)")
_MEMORY = re.compile(r"(?:Overall peak memory footprint \(MB\) via periodic monitoring: |\boverall=)([\d.]{1,20})")


def _read_benchmark_model(data: bytes) -> Iterator[ForeignCase]:
    """Read a log, or multiple logs in one file.

    In each log, the last line with a count is the measurement; earlier lines are warm-ups.
    """
    model, counted, case = "", None, None
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        place = f"line {number}"
        if found := _GRAPH.search(line):
            model = PurePath(found[1] or found[2]).name
        elif found := _COUNT.search(line):
            counted = found
        elif found := _TIMINGS.search(line):
            if case is not None:
                yield case
            values = dict(part.split("=", 1) for part in counted[2].split() if "=" in part) if counted else {}
            case = ForeignCase(
                name=model or "model",
                samples_ns=[],
                iterations=int(counted[1]) if counted else 0,
                clock="board",
                p50_ns=_parse_time(values.get("median", found[4]), 1e3, place),
                model=model,
                runtime="tflite",
            )
            counted = None
        elif case is not None and (found := _MEMORY.search(line)):
            case = replace(case, peak_memory_bytes=_parse_megabytes(found[1], place))
    if case is not None:
        yield case


def _parse_time(text: str, factor: float, place: str) -> float:
    try:
        return _time(float(text), factor, place)
    except ValueError as error:
        if isinstance(error, _InvalidFile):
            raise
        raise _InvalidFile(f"{place}: expected a number, got {text!r:.60}") from error


def _parse_megabytes(text: str, place: str) -> int:
    try:
        return int(float(text) * (1 << 20))
    except ValueError as error:
        raise _InvalidFile(f"{place}: expected a size in MB, got {text!r:.60}") from error


def _read_trtexec(data: bytes) -> Iterator[ForeignCase]:
    samples = []
    for number, row in enumerate(_list(_parse(data), "the file")):
        row, place = _require_mapping(row, f"[{number}]"), f"[{number}].computeMs"
        value = row.get("computeMs")
        if value is None and {"startComputeMs", "endComputeMs"} <= row.keys():
            start, end = row["startComputeMs"], row["endComputeMs"]
            value = end - start if all(isinstance(one, (int, float)) for one in (start, end)) else None
        samples.append(_time(value, 1e6, place))
    if samples:
        yield ForeignCase(
            name="queries", samples_ns=samples, iterations=len(samples), clock="board", runtime="tensorrt"
        )


def _read_polygraphy(data: bytes) -> Iterator[ForeignCase]:
    for number, pair in enumerate(_list(_require_mapping(_parse(data), "the file").get("lst"), "lst")):
        place = f"lst[{number}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise _InvalidFile(f"{place} must be a list of a runner and its iterations, got {_format_value(pair)}")
        runner = _RUNNER_SUFFIX.sub("", _require_text(pair[0], f"{place}[0]"))
        samples = []
        for index, iteration in enumerate(_list(pair[1], f"{place}[1]")):
            where = f"{place}[1][{index}].runtime"
            value = _require_mapping(iteration, f"{place}[1][{index}]").get("runtime")
            if value is not None:  # absent for custom outputs
                samples.append(_time(value, 1e9, where))
        if samples:
            yield ForeignCase(name=runner, samples_ns=samples, iterations=len(samples), clock="host", runtime=runner)


FORMATS: Mapping[str, Callable[[bytes], Iterator[ForeignCase]]] = {
    "google-benchmark": _read_google,
    "benchmark-model": _read_benchmark_model,
    "trtexec": _read_trtexec,
    "polygraphy": _read_polygraphy,
}
