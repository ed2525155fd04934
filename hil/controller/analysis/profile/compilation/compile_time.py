"""Profile a compilation: the time of phases and passes, the dispatches, and the executables."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.analysis.profile.compilation.estimate import Estimate, Estimates, estimate
from hil.controller.analysis.profile.rows import DISPATCHES, EXECUTABLES, PASSES, join_list
from hil.controller.analysis.profile.sites import Sites, find_sites
from hil.controller.backends.compilers.iree import convert_for_iree
from hil.controller.backends.compilers.iree_program import choose_settings
from hil.controller.models.compiling import CachedCall, call_isolated, convert_compiler_errors
from hil.controller.models.conversions import convert_to_onnx
from hil.core.clock import get_time_ns
from hil.core.files import MAX_FILE_BYTES, read_file, read_text
from hil.core.narrow_integers import is_narrowed
from hil.core.processes import make_module_command
from hil.core.results import Model
from hil.core.scratch import make_temporary_folder
from hil.core.timeline import Span
from hil.errors import StorageError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Table columns.
_COLUMNS = {
    PASSES: "phase depth pass wall_ms cpu_ms share_of_phase",
    DISPATCHES: "region loop dispatch onnx_nodes op_types shapes source_bytes flops_estimate bytes_estimate "
    "flops_per_byte_estimate bound_estimate time_us_estimate share_estimate",
    EXECUTABLES: "executable bytes share_of_program",
}
# Report lines that are not passes: the time between passes, and the sum.
_SUMS = ("Rest", "Total")


@dataclass(frozen=True)
class CompileProfile:
    """A compilation's profile."""

    folder: Path  # contains ``passes.csv``, ``dispatches.csv`` and ``executables.csv``
    # spans on the host's clock, outermost first: the whole, the phases, the passes. Phase times are measured. Passes
    # are placed end to end within their phase, because the compiler reports only durations.
    spans: Sequence[Span]
    # the program's operations, end to end over the compilation time. A span's length is the operation's share of the
    # estimated run time.
    operations: Sequence[Span] = ()
    notes: Sequence[str] = ()  # unavailable data, one line each


@dataclass(frozen=True)
class _Operation:
    """A call of a dispatch, or a node for runtimes with a kernel per node."""

    region: int
    loop: str
    name: str
    nodes: Sequence[str]
    types: Sequence[str]
    work: Estimate
    source_bytes: int | None = None


def profile_compile(
    model: Model,
    *,
    runtime: str,
    flags: Sequence[str],
    folder: Path,
    **how: Unpack[CachedCall],
) -> CompileProfile:
    """Recompile a model without the cache, and write the time profile to a directory.

    Args:
        runtime: ``iree`` or ``onnxruntime``. ONNX Runtime does not compile, so its phases are the phases of creating a
            session.
        flags: compiler flags including the target, as in an artifact.

    Raises:
        UsageError: the model is precompiled, or the runtime is unsupported.
        StorageError: the directory cannot be written.
    """
    if model.format == "vmfb" or runtime not in ("iree", "onnxruntime"):
        what = "a precompiled model" if model.format == "vmfb" else f"a model for {runtime}"
        raise UsageError(f"cannot profile the compilation of {what} ({model.format}): IREE does not compile it")
    if runtime == "iree":
        taken = convert_for_iree(model, flags, {**how, "recompute": False})
        built = taken.model
        with convert_compiler_errors():
            recipe = {
                "format": built.format,
                "dims": dict(built.dims),
                "flags": choose_settings(built, taken.flags).flags,
            }
            found = call_isolated(compile_iree, {"model": str(built.path.absolute()), **recipe}, how)
        sites = find_sites(model, flags, **how)
        operations, notes = list(_iter_dispatches(sites, found["sources"])), sites.notes
    else:
        built = convert_to_onnx(model, cache=how["cache"], isolated=how["isolated"], log=how["log"])
        with convert_compiler_errors():
            found = call_isolated(load_onnxruntime, {"model": str(built.path.absolute())}, how)
        operations = list(_iter_nodes(estimate(built, **how)))
        notes = [f"{runtime} does not compile: the phases are from session creation on this machine"]
    tables = {
        PASSES: _iter_pass_rows(found["phases"]),
        DISPATCHES: _iter_operation_rows(operations),
        EXECUTABLES: _iter_executable_rows(found["binaries"], found["program"]),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in tables.items():
            with (folder / name).open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([_COLUMNS[name].split(), *rows])
    except OSError as error:
        raise StorageError(f"cannot write the compile-time profile to {folder}: {error.strerror}") from error
    spans = tuple(_iter_phase_spans(model.name, found["phases"]))
    return CompileProfile(folder, spans, tuple(_iter_operation_spans(operations, spans)), tuple(notes))


def _iter_pass_rows(phases: Sequence[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """Yield the phases with depth 0, followed by their passes, recursively."""
    for phase, begin, end, passes in phases:
        took = (end - begin) / 1e9
        yield phase, 0, phase, f"{took * 1e3:.3f}", None, "1.0000"
        pending = [(1, one) for one in reversed(passes)]
        while pending:
            depth, (name, wall, cpu, within) = pending.pop()
            yield phase, depth, name, f"{wall * 1e3:.3f}", f"{cpu * 1e3:.3f}", f"{wall / took if took else 0:.4f}"
            pending += [(depth + 1, one) for one in reversed(within)]


def _iter_dispatches(sites: Sites, sources: Mapping[str, int]) -> Iterator[_Operation]:
    """Yield every dispatch call, in the program's order."""
    # `module_main$async_dispatch_3.mlir` is the source for the call `main$async_dispatch_3_matmul_..`.
    sizes = {name.partition("_")[2].removesuffix(".mlir"): size for name, size in sources.items()}
    for number, region in enumerate(sites.regions):
        for site in region.sites:
            own = max((name for name in sizes if f"{site.key}_".startswith(f"{name}_")), key=len, default="")
            work = Estimate(site.flops, site.bytes, site.shapes)
            types = tuple(sites.op_types.get(node, "") for node in site.nodes)
            yield _Operation(number, region.loop, site.key, site.nodes, types, work, sizes.get(own))


def _iter_nodes(estimates: Estimates) -> Iterator[_Operation]:
    """Yield the model's nodes, for a runtime with a kernel per node. Nodes that the runtime fuses share a kernel."""
    for name, node in estimates.nodes.items():
        yield _Operation(0, "", name, (name,), (node.op_type,), estimates.estimate([name]))


def _iter_operation_rows(operations: Sequence[_Operation]) -> Iterator[Sequence[Any]]:
    whole = sum(one.work.nominal_ns or 0 for one in operations)
    for one in operations:
        work, time = one.work, one.work.nominal_ns
        yield (
            *(one.region, one.loop, one.name, join_list(tuple(one.nodes)), join_list(tuple(one.types))),
            *(work.shapes, one.source_bytes, work.flops, work.bytes),
            None if work.intensity is None else f"{work.intensity:.3f}",
            work.bound,
            None if time is None else f"{time / 1e3:.3f}",
            None if time is None or not whole else f"{time / whole:.4f}",
        )


def _iter_operation_spans(operations: Sequence[_Operation], compilation: Sequence[Span]) -> Iterator[Span]:
    """Yield the operations with a known estimate as spans over the compilation time."""
    whole = sum(one.work.nominal_ns or 0 for one in operations)
    if not (whole and compilation):
        return
    begin = at = compilation[0].start_ns
    scale = (compilation[0].end_ns - begin) / whole
    done = 0.0
    for one in operations:
        time = one.work.nominal_ns or 0
        done += time
        until = begin + int(done * scale)
        if until > at:
            args: dict[str, str | int | float] = {
                "operation": one.name,
                "types": ", ".join(one.types),
                "shapes": one.work.shapes,
                "operations": one.work.flops or 0,
                "bytes": one.work.bytes or 0,
                "bound by": one.work.bound,
                "estimated us": time / 1e3,
                "share of the estimated time": time / whole,
            }
            yield Span(", ".join(one.nodes) or one.name, at, until, args)
        at = until


def _iter_executable_rows(binaries: Mapping[str, int], program: int) -> Iterator[Sequence[Any]]:
    """Yield every binary in the program, and the remaining bytes: weights and the program's host code."""
    rest = program - sum(binaries.values())
    for name, size in [*binaries.items(), ("(weights and other data)", rest)]:
        yield name, size, f"{size / program:.4f}"


def _iter_phase_spans(model: str, phases: Sequence[Sequence[Any]]) -> Iterator[Span]:
    if not phases:
        return
    yield Span(f"compile {model}", phases[0][1], phases[-1][2])
    for phase, begin, end, passes in phases:
        yield Span(phase, begin, end)
        yield from _lay_out_passes(passes, begin, end)


def _lay_out_passes(passes: Sequence[Sequence[Any]], begin: int, end: int) -> Iterator[Span]:
    """Yield passes end to end within a phase.

    If passes run on multiple threads, their sum may exceed the phase. The passes are then scaled down.
    """
    lengths = [max(0, round(wall * 1e9)) for _, wall, _, _ in passes]
    squeeze = min(1.0, (end - begin) / sum(lengths)) if sum(lengths) else 1.0
    at = begin
    for (name, wall, cpu, within), length in zip(passes, lengths, strict=True):
        until = min(end, at + int(length * squeeze))
        if until > at:
            yield Span(name, at, until, {"wall ms": wall * 1e3, "cpu ms": cpu * 1e3})
            yield from _lay_out_passes(within, at, until)
        at = until


def compile_iree(model: str, format: str, dims: Mapping[str, int], flags: Sequence[str]) -> dict[str, Any]:
    """Compile an ONNX or MLIR model. Runs in an isolated process.

    Returns:
        ``phases``: [name, start, end, passes], on this machine's clock in ns; a pass is [name, wall seconds, CPU
        seconds over all threads, nested passes]. ``sources``: executable -> IR bytes; ``binaries``: file ->
        bytes; ``program``: total bytes.
    """
    from hil.controller.backends.compilers.iree_program import check_target, fail

    phases: list[list[Any]] = []
    with make_temporary_folder("hil-phases-") as scratch:
        folder = Path(scratch)
        folders = {name: folder / name for name in ("reports", "sources", "binaries")}
        for each in folders.values():
            each.mkdir()
        source = Path(model)
        if format == "onnx":
            from hil.controller.backends.compilers.onnx_to_mlir import convert

            source, begin = folder / "model.mlirbc", get_time_ns()
            convert(Path(model), dims, None, source, folder / "params.irpa", None, narrow=is_narrowed(flags))
            phases.append(["import", begin, get_time_ns(), []])
        out = folder / "main.vmfb"
        command = make_module_command("hil.controller.analysis.profile.compilation.compile_phases")
        command += [str(source), str(out), str(folders["reports"]), *flags]
        command += [f"--iree-hal-dump-executable-{kind}-to={folders[kind]}" for kind in ("sources", "binaries")]
        print("$", *command, flush=True)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        timed = [json.loads(line) for line in done.stdout.splitlines()]
        reports = [read_text(folders["reports"] / name, MAX_FILE_BYTES, errors="replace") for name, _, _ in timed]
        # If the compiler crashed, the newest report belongs to the failed step.
        newest = sorted(folders["reports"].iterdir(), key=lambda file: file.stat().st_mtime_ns)[-1:]
        texts = [*reports[:-1], *(read_text(file, MAX_FILE_BYTES, errors="replace") for file in newest)]
        output = done.stderr.decode(errors="replace") + "".join(_split_report(text)[1] for text in texts)
        print(output, flush=True)
        check_target(output)
        if done.returncode:
            fail(done.returncode, output)
        phases += [
            [*times, _convert_passes(_split_report(report)[0])] for times, report in zip(timed, reports, strict=True)
        ]
        sizes = {
            kind: {file.name: file.stat().st_size for file in sorted(folders[kind].iterdir())}
            for kind in ("sources", "binaries")
        }
        return {"phases": phases, **sizes, "program": out.stat().st_size}


def load_onnxruntime(model: str) -> dict[str, Any]:
    """Create an ONNX Runtime session, and profile the phases: reading, optimising and planning.

    Returns:
        The same fields as :func:`compile_iree`.
    """
    import onnxruntime

    with make_temporary_folder("hil-session-") as folder:
        options = onnxruntime.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = f"{folder}/session"
        begin = get_time_ns()
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        events = json.loads(read_file(Path(session.end_profiling())))
    phases = [
        [event["name"], begin + event["ts"] * 1000, begin + (event["ts"] + event["dur"]) * 1000, []]
        for event in events
        if event.get("cat") == "Session"
    ]
    return {"phases": phases, "sources": {}, "binaries": {}, "program": Path(model).stat().st_size}


def _split_report(report: str) -> tuple[list[Any], str]:
    """Split the compiler's output into the passes, a JSON list, and the remaining text."""
    lines = report.splitlines()
    begin = lines.index("[") if "[" in lines else len(lines)
    end = lines.index("]", begin) + 1 if "]" in lines[begin:] else len(lines)
    passes = json.loads("\n".join(lines[begin:end])) if "]" in lines[begin:end] else []
    return passes, "\n".join([*lines[:begin], *lines[end:]])


def _convert_passes(items: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    # Every pass list ends with an empty pass.
    return [
        [
            item["name"],
            item["wall"]["duration"],
            item.get("user", item["wall"])["duration"],
            _convert_passes(item["passes"]),
        ]
        for item in items
        if item and item["name"] not in _SUMS and "passes" in item
    ]
