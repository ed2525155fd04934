"""What a case ended in, as a record for run.json and ``--json``, and as text for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hil.controller.pipeline import Case
from hil.results import RunResult, Verdict
from hil.tensors import TensorSpec

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_SAMPLES_KEPT = 10_000


def device_statistics(result: RunResult) -> dict[str, Any]:
    """Device time in nanoseconds: iterations, p50, p90, min, mean, stdev and the samples (at most 10,000)."""
    samples = result.device_ns
    if not samples:
        return {"iterations": 0}
    ordered = sorted(samples)
    return {
        "iterations": len(samples),
        "p50_ns": statistics.median(ordered),
        "p90_ns": ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)],
        "min_ns": ordered[0],
        "mean_ns": statistics.fmean(samples),
        "stdev_ns": statistics.stdev(samples) if len(samples) > 1 else 0.0,
        "samples_ns": samples[:_SAMPLES_KEPT],
    }


def case_record(case: Case, tensors: dict[str, Any]) -> dict[str, Any]:
    """A case as run.json holds it.

    Args:
        case: in whatever state it is.
        tensors: what was stored of it so far: ``inputs``, ``outputs``, ``references`` -> entries with files.
    """
    artifact, model, error = case.artifact, case.model, case.error
    stored_references = tensors.get("references") or [[] for _ in case.references]
    return {
        "name": case.name,
        "path": str(case.path),
        "outcome": case.outcome.value if case.outcome else None,
        "stage": case.stage,
        "reason": case.reason,
        "error": error
        and {"kind": type(error).__name__, "hint": error.hint, "board": error.board, "detail": error.detail},
        "model": model
        and {
            "format": model.format,
            "digest": model.digest,
            "function": model.function,
            "inputs": _specs(model.inputs),
            "outputs": _specs(model.outputs),
        },
        "artifact": artifact
        and {
            "runtime": artifact.runtime,
            "compiler": artifact.compiler,
            "flags": list(artifact.flags),
            "function": artifact.function,
            "digests": dict(artifact.digests),
            "bytes": sum(path.stat().st_size for path in artifact.files.values() if path.exists()),
            "cached": artifact.cached,
        },
        "timings": asdict(case.timings),
        "pushed_bytes": case.pushed_bytes,
        "device": device_statistics(case.result) if case.result else None,
        "peak_memory_bytes": case.result.peak_memory_bytes if case.result else None,
        "provenance": dict(case.result.provenance) if case.result else {},
        "inputs": tensors.get("inputs", []),
        "outputs": tensors.get("outputs", []),
        "references": [
            {"source": reference.source, "provenance": dict(reference.provenance), "outputs": stored}
            for reference, stored in zip(case.references, stored_references, strict=True)
        ],
        "verdicts": [verdict_record(verdict) for verdict in case.verdicts],
        "worker_log": case.worker_log[-200:],
    }


def verdict_record(verdict: Verdict) -> dict[str, Any]:
    """A verdict with all its statistics."""
    outputs = [{**asdict(output), "mismatch_share": output.mismatch_share} for output in verdict.outputs]
    return {
        "outcome": verdict.outcome.value,
        "against": verdict.against,
        "reason": verdict.reason,
        "outputs": outputs,
    }


def _specs(specs: Sequence[TensorSpec] | None) -> list[dict[str, Any]] | None:
    return None if specs is None else [asdict(spec) for spec in specs]


def print_case(console: Console, case: dict[str, Any], *, where: str = "") -> None:
    """A case's final screen: outcome, statistics of each output, device time, stages, and where it is stored.

    Args:
        case: a record of :func:`case_record`.
        where: the run's folder.
    """
    outcome = case["outcome"] or "UNFINISHED"
    colour = {"PASS": "green", "FAIL": "red"}.get(outcome, "magenta")
    console.print(f"[bold {colour}]{outcome}[/]  [bold]{_escape(case['name'])}[/]  {_escape(_how(case))}")
    if case["reason"]:
        console.print(f"  {_escape(case['reason'])}", highlight=False)
    if case["error"]:
        _print_error(console, case)
    for verdict in case["verdicts"]:
        console.print(verdict_table(verdict))
    if case["device"] and case["device"]["iterations"]:
        device = case["device"]
        times = "  ".join(f"{name} {_ns(device[f'{name}_ns'])}" for name in ("p50", "p90", "min", "stdev"))
        console.print(f"  device time  {times}  ({device['iterations']} iterations)", highlight=False)
    spent = [f"{key[:-2]} {_seconds(value)}" for key, value in case["timings"].items() if value is not None]
    if spent:
        console.print(f"  host time    {'  '.join(spent)}", highlight=False)
    if where:
        console.print(f"  stored in    {_escape(where)}", highlight=False, soft_wrap=True)


def verdict_table(verdict: dict[str, Any]) -> RenderableType:
    """A verdict's outputs as a table."""
    from rich.table import Table

    table = Table(
        title=f"against {verdict['against']}", title_justify="left", title_style="dim", box=None, pad_edge=True
    )
    for column in ("output", "shape", "agrees", "mismatches", "max abs", "max rel", "ULP", "RMSE", "cosine", "SQNR dB"):
        table.add_column(column, justify="left" if column in ("output", "shape", "agrees") else "right")
    for output in verdict["outputs"]:
        shape = "x".join(str(dim) for dim in output["shape"]) or "scalar"
        table.add_row(
            _escape(output["name"]),
            f"{shape} {output['dtype']}",
            "[green]yes[/]" if output["passed"] else "[red]no[/]",
            "-" if output["mismatches"] is None else f"{output['mismatches']} of {output['elements']}",
            *(_number(output[key]) for key in ("max_abs", "max_rel", "max_ulp", "rmse", "cosine", "sqnr_db")),
        )
        if not output["passed"]:
            table.add_row("", "", f"[red]{_escape(_why(output))}[/]")
    return table


def _why(output: dict[str, Any]) -> str:
    if output["worst_index"] is None:
        return str(output["reason"])
    actual, expected = output["worst_values"]
    return f"{output['reason']}; worst at {list(output['worst_index'])}: {actual} instead of {expected}"


def _how(case: dict[str, Any]) -> str:
    artifact = case["artifact"]
    if not artifact:
        return ""
    board = case["provenance"].get("board", "")
    on = f" on {board}" if board else ""
    return f"{artifact['runtime']} {case['provenance'].get('runtime_version', '')}{on}".replace("  ", " ")


def _print_error(console: Console, case: dict[str, Any]) -> None:
    error = case["error"]
    where = f"{case['stage']}" + (f" on board {error['board']}" if error["board"] else "")
    console.print(f"  stage        {_escape(where)}", highlight=False)
    for line in error["detail"].strip().splitlines()[-12:]:
        console.print(f"    {_escape(line)}", style="dim", highlight=False)
    if error["hint"]:
        console.print(f"  hint         {_escape(error['hint'])}", highlight=False)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _ns(value: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} ns"


def _seconds(value: float) -> str:
    return _ns(value * 1e9)
