"""Where the time goes while a model is compiled, and what comes of it: passes, dispatches, executables."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.controller.analysis.profile.compile_time_build import compile_iree, load_onnxruntime
from hil.controller.analysis.profile.estimate import RIDGE, Estimate, Estimates, estimate
from hil.controller.analysis.profile.rows import join_list
from hil.controller.analysis.profile.sites import Sites, sites_of
from hil.controller.backends.compilers.iree import recipe_of
from hil.controller.backends.compilers.iree_takes import as_iree_takes
from hil.controller.models.compile_errors import compiling
from hil.controller.models.conversions import as_onnx
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.core.artifacts import Model
from hil.core.timeline import Span
from hil.errors import StorageError, UsageError

PASSES, DISPATCHES, EXECUTABLES = "passes.csv", "dispatches.csv", "executables.csv"
_PASSES = ("phase", "depth", "pass", "wall_ms", "cpu_ms", "share_of_phase")
_DISPATCHES = (
    "region",
    "loop",
    "dispatch",
    "onnx_nodes",
    "op_types",
    "shapes",
    "source_bytes",
    "flops_estimate",
    "bytes_estimate",
    "flops_per_byte_estimate",
    "bound_estimate",
)
_EXECUTABLES = ("executable", "bytes", "share_of_program")


@dataclass(frozen=True)
class CompileProfile:
    """One compilation, looked into.

    Attributes:
        folder: holds ``passes.csv``, ``dispatches.csv`` and ``executables.csv``.
        spans: host clock, those that hold others before them: the whole, its phases, and within these their passes. A
            phase's times were measured; passes are laid end to end within theirs, since the compiler tells how long
            each took and not when.
        notes: what could not be had, a line each.
    """

    folder: Path
    spans: Sequence[Span]
    notes: Sequence[str] = ()


def profile_compile(
    model: Model,
    *,
    runtime: str,
    flags: Sequence[str],
    folder: Path,
    cache: Cache,
    isolated: Isolated,
    timeout: float | None,
    log: Path,
    ridge: float = RIDGE,
) -> CompileProfile:
    """Compile a model once more, nothing taken from the cache, and write where the time went into a folder.

    Args:
        model: an ONNX or MLIR model.
        runtime: ``iree``, or ``onnxruntime``, which compiles nothing: its phases are those of creating a session.
        flags: the compiler's, target included: an artifact's.
        folder: made if need be; its three files are written anew.
        cache: where the dispatches' nodes are kept.
        isolated: where the compiler runs.
        timeout: seconds that it may take.
        log: what it prints is appended here.
        ridge: operations a byte at which computing takes as long as moving.

    Raises:
        UsageError: nothing is compiled of such a model; the compiler is not installed or knows no such flag.
        StorageError: the folder cannot be written.
        CompileFailed, CompileCrashed, StageTimeout: as for compiling.
    """
    if model.format == "vmfb" or runtime not in ("iree", "onnxruntime"):
        what = "a model that came compiled" if model.format == "vmfb" else f"a model for {runtime}"
        raise UsageError(f"{what} ({model.format}) is not compiled by IREE, so there is no time to tell")
    given = model
    settings: dict[str, Any] = {"cache": cache, "isolated": isolated, "timeout": timeout, "log": log}
    if runtime == "iree":
        taken = as_iree_takes(model, flags, **settings)
        model, own_flags = taken.model, taken.flags
    else:
        model = as_onnx(model, cache=cache, isolated=isolated, log=log)
    arguments: dict[str, Any] = {"model": str(model.path.absolute())}
    function: Callable[..., dict[str, Any]] = load_onnxruntime
    notes: list[str] = []
    if runtime == "iree":
        function = compile_iree
        arguments |= {"format": model.format, "dims": dict(model.dims), "flags": recipe_of(model, own_flags).flags}
    else:
        notes.append(f"{runtime} compiles nothing: its phases are those of creating a session on this machine")
    with compiling():
        found = isolated.call(function, arguments, timeout=timeout, log=log)
    if runtime == "iree":
        sites = sites_of(given, flags, **settings)
        dispatches = _dispatch_rows(sites, found["sources"], ridge)
        notes += sites.notes
    else:
        of_nodes = estimate(model, cache=cache, isolated=isolated, timeout=timeout, log=log, ridge=ridge)
        dispatches = _node_rows(of_nodes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / PASSES, _PASSES, _pass_rows(found["phases"]))
        _write(folder / DISPATCHES, _DISPATCHES, dispatches)
        _write(folder / EXECUTABLES, _EXECUTABLES, _executable_rows(found["binaries"], found["program"]))
    except OSError as error:
        raise StorageError(f"the compile-time profile cannot be written to {folder}: {error.strerror}") from error
    return CompileProfile(folder, tuple(_spans(model.name, found["phases"])), tuple(notes))


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(["" if value is None else value for value in row] for row in rows)


def _pass_rows(phases: Sequence[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """The phases, depth 0, each followed by its passes and what is within these."""
    for phase, begin, end, passes in phases:
        took = (end - begin) / 1e9
        yield phase, 0, phase, f"{took * 1e3:.3f}", None, "1.0000"
        for depth, name, wall, cpu in _flat(passes, 1):
            yield phase, depth, name, f"{wall * 1e3:.3f}", f"{cpu * 1e3:.3f}", f"{wall / took if took else 0:.4f}"


def _flat(passes: Sequence[Sequence[Any]], depth: int) -> Iterator[tuple[int, str, float, float]]:
    for name, wall, cpu, within in passes:
        yield depth, name, wall, cpu
        yield from _flat(within, depth + 1)


def _dispatch_rows(sites: Sites, sources: Mapping[str, int], ridge: float) -> Iterator[Sequence[Any]]:
    """Each call of a dispatch, in the program's order."""
    # `module_main$async_dispatch_3.mlir` holds what `main$async_dispatch_3_matmul_..` is called in.
    sizes = {name.partition("_")[2].removesuffix(".mlir"): size for name, size in sources.items()}
    for number, region in enumerate(sites.regions):
        for site in region.sites:
            own = max((name for name in sizes if f"{site.key}_".startswith(f"{name}_")), key=len, default="")
            told = Estimate(site.flops, site.bytes, site.shapes, ridge)
            types = tuple(sites.op_types.get(node, "") for node in site.nodes)
            yield number, region.loop, site.key, join_list(site.nodes), join_list(types), *_told(told, sizes.get(own))


def _node_rows(estimates: Estimates) -> Iterator[Sequence[Any]]:
    """The model's nodes, where a runtime calls a kernel for each, but for those that it fuses."""
    for name, node in estimates.nodes.items():
        yield 0, "", name, join_list((name,)), join_list((node.op_type,)), *_told(estimates.of([name]), None)


def _told(told: Estimate, size: int | None) -> Sequence[Any]:
    intensity = None if told.intensity is None else f"{told.intensity:.3f}"
    return told.shapes, size, told.flops, told.bytes, intensity, told.bound


def _executable_rows(binaries: Mapping[str, int], program: int) -> Iterator[Sequence[Any]]:
    """Each binary in the program, and what there is besides: weights and the program's own steps."""
    rest = program - sum(binaries.values())
    for name, size in [*binaries.items(), ("(weights and all else)", rest)]:
        yield name, size, f"{size / program:.4f}"


def _spans(model: str, phases: Sequence[Sequence[Any]]) -> Iterator[Span]:
    if not phases:
        return
    yield Span(f"compile {model}", phases[0][1], phases[-1][2])
    for phase, begin, end, passes in phases:
        yield Span(phase, begin, end)
        yield from _laid(passes, begin, end)


def _laid(passes: Sequence[Sequence[Any]], begin: int, end: int) -> Iterator[Span]:
    """Passes end to end from the begin of what they are in; squeezed where, on several threads, they took longer."""
    lengths = [max(0, round(wall * 1e9)) for _, wall, _, _ in passes]
    squeeze = min(1.0, (end - begin) / sum(lengths)) if sum(lengths) else 1.0
    at = begin
    for (name, wall, cpu, within), length in zip(passes, lengths, strict=True):
        until = min(end, at + int(length * squeeze))
        if until > at:
            yield Span(name, at, until, {"wall ms": wall * 1e3, "cpu ms": cpu * 1e3})
            yield from _laid(within, at, until)
        at = until
