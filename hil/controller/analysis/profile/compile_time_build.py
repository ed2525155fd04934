"""What happens in the isolated process: a model compiled with its phases timed. Nothing here is called elsewhere."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.core.clock import now_ns
from hil.core.installation import module_command
from hil.core.scratch import temporary_folder

# Of the report's lines those that are no passes: what was left between them, and their sum.
_SUMS = ("Rest", "Total")


def compile_iree(model: str, format: str, dims: Mapping[str, int], flags: Sequence[str]) -> dict[str, Any]:
    """Compile an ONNX or MLIR model.

    Returns:
        ``phases``: [name, begin, end, passes], this machine's clock in ns, in order; a pass is [name, wall seconds, CPU
        seconds of all threads, passes within it]. ``sources``: executable -> bytes of its IR; ``binaries``: file's name
        -> bytes; ``program``: bytes of the whole.

    Raises:
        UsageError, CompileFailed, CompileCrashed: as for compiling.
    """
    from hil.controller.backends.compilers.iree_build import check_target, fail

    phases: list[list[Any]] = []
    with temporary_folder("hil-phases-") as scratch:
        folder = Path(scratch)
        folders = {name: folder / name for name in ("reports", "sources", "binaries")}
        for each in folders.values():
            each.mkdir()
        source = Path(model)
        if format == "onnx":
            from hil.controller.backends.compilers.onnx_to_mlir import convert

            source, begin = folder / "model.mlirbc", now_ns()
            convert(Path(model), dims, None, source, folder / "params.irpa", None)
            phases.append(["import", begin, now_ns(), []])
        out = folder / "main.vmfb"
        command = module_command("hil.controller.analysis.profile.compile_phases")
        command += [str(source), str(out), str(folders["reports"]), *flags]
        command += [f"--iree-hal-dump-executable-{kind}-to={folders[kind]}" for kind in ("sources", "binaries")]
        print("$", *command, flush=True)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        timed = [json.loads(line) for line in done.stdout.splitlines()]
        reports = [(folders["reports"] / name).read_text(errors="replace") for name, _, _ in timed]
        # What it could not even say the name of: the step that it died in is the newest report.
        newest = sorted(folders["reports"].iterdir(), key=lambda file: file.stat().st_mtime_ns)[-1:]
        said = done.stderr.decode(errors="replace") + "".join(
            "\n".join(_without_report(text.splitlines()))
            for text in [*reports[:-1], *(file.read_text(errors="replace") for file in newest)]
        )
        print(said, flush=True)
        check_target(said)
        if done.returncode:
            fail(done.returncode, said)
        phases += [[*times, _passes(report)] for times, report in zip(timed, reports, strict=True)]
        return {
            "phases": phases,
            "sources": _sizes(folders["sources"]),
            "binaries": _sizes(folders["binaries"]),
            "program": out.stat().st_size,
        }


def load_onnxruntime(model: str) -> dict[str, Any]:
    """Create a session of ONNX Runtime's, as its board does: it compiles nothing, but reads, optimises and plans.

    Returns:
        ``phases`` as of :func:`compile_iree`, of no passes.
    """
    import onnxruntime

    with temporary_folder("hil-session-") as folder:
        options = onnxruntime.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = f"{folder}/session"
        begin = now_ns()
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        events = json.loads(Path(session.end_profiling()).read_bytes())
    phases = [
        [event["name"], begin + event["ts"] * 1000, begin + (event["ts"] + event["dur"]) * 1000, []]
        for event in events
        if event.get("cat") == "Session"
    ]
    return {"phases": phases, "sources": {}, "binaries": {}, "program": Path(model).stat().st_size}


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(folder.iterdir())}


def _report_lines(lines: Sequence[str]) -> tuple[int, int]:
    """Where the report of passes begins and ends among what else the compiler printed."""
    begin = lines.index("[") if "[" in lines else len(lines)
    end = lines.index("]", begin) + 1 if "]" in lines[begin:] else len(lines)
    return begin, end


def _without_report(lines: Sequence[str]) -> list[str]:
    begin, end = _report_lines(lines)
    return [*lines[:begin], *lines[end:]]


def _passes(report: str) -> list[list[Any]]:
    lines = report.splitlines()
    begin, end = _report_lines(lines)
    return _nested(json.loads("\n".join(lines[begin:end]))) if begin < end else []


def _nested(items: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    # Every list of passes ends with an empty one.
    return [
        [item["name"], item["wall"]["duration"], item.get("user", item["wall"])["duration"], _nested(item["passes"])]
        for item in items
        if item and item["name"] not in _SUMS and "passes" in item
    ]
