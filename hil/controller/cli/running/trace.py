"""`hil trace`: replay stored traces on boards, compare and show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hil.controller.cli.automatic_history import add_to_history
from hil.controller.cli.commands import group
from hil.controller.cli.options import (
    FILE,
    arithmetic_option,
    cache_options,
    iteration_options,
    json_option,
    label_option,
    limit_options,
    run_options,
    runs_option,
    split_targets,
    target_options,
    tolerance_options,
)
from hil.controller.cli.screen import Screen, answer, answer_matrix

_TRACE = click.argument("trace", type=FILE)


@group(epilog="Example: hil trace run hil-traces/Module/iree_llvmcpu/traces/predict --board root@10.0.0.7")
def trace() -> None:
    """Replay the calls of a stored trace on any board, and compare traces call by call.

    Module tests store traces (docs/traces.md). A TRACE is a directory with trace.json.
    """


@trace.command(epilog="Example: hil trace run hil-traces/Module/iree_llvmcpu/traces/predict --board root@10.0.0.7")
@_TRACE
@target_options
@click.option(
    "--against",
    type=FILE,
    metavar="TRACE",
    help="Trace with the expected outputs (default: the reference of TRACE).",
)
@run_options("device", "compile_flags")
@cache_options
@tolerance_options
@arithmetic_option
@iteration_options
@limit_options
@label_option
@runs_option
@json_option
def run(trace: Path, against: Path | None, as_json: bool, **settings: Any) -> int:
    """Compile the functions of a TRACE for a board, and replay all calls in order, with their state.

    Values assigned by a call are inputs of later calls, and are compared like outputs. Results are stored continuously
    as with `hil run`; the run's directory `trace` is a trace of this board. With multiple values of --board or
    --runtime-hw-type, each value is a target. The result is then a table with a row per call and a column per target.
    """
    from hil.controller.pipeline.settings.options import Job
    from hil.controller.workloads.bundles.show import print_run
    from hil.controller.workloads.traces.run import run_trace

    targets = split_targets(settings, "board", "hw_type")
    job = Job(models=(trace,), **settings)
    with Screen(quiet=as_json) as screen:
        if len(targets) > 1:
            from hil.controller.workloads.matrix.workloads import trace_matrix

            made = trace_matrix(job, targets, against, screen=screen)
            add_to_history(made[0])
            return answer_matrix(as_json, *made)
        record = run_trace(job, against, screen=screen)
    add_to_history(record.folder or None)
    return answer(as_json, record, show=lambda: print_run(record))


@trace.command(epilog="Example: hil trace compare hil-traces/Module/iree_vmvx hil-traces/Module/tf_ref --rtol 1e-4")
@click.argument("a", type=FILE)
@click.argument("b", type=FILE)
@tolerance_options
@runs_option
@json_option
def compare(a: Path, b: Path, as_json: bool, out: Path | None, **tolerance: Any) -> int:
    """Compare the calls of A with the calls of B, the reference. Traces may be from any backend, board and machine.

    A and B are trace directories, IDs of `hil trace run`, or directories of traces. In directories of traces, traces
    with the same relative path are compared.
    """
    from hil.compare.tolerance import check_tolerance
    from hil.controller.pipeline.verdicts.accepting import load_rules
    from hil.controller.records.trace import TraceComparisonDocument
    from hil.controller.workloads.traces.comparing import Judging
    from hil.controller.workloads.traces.stored import compare_stored, exit_code

    check_tolerance(tolerance["rtol"], tolerance["atol"])
    tolerance["accept"] = load_rules(tolerance["accept"])
    found = compare_stored(a, b, Judging(**tolerance), out)
    document = TraceComparisonDocument(traces=[one.to_record() for one in found], exit_code=exit_code(found))
    return answer(as_json, document, *(line for one in found for line in one.lines()))


@trace.command(epilog="Example: hil trace show hil-traces/Module/iree_llvmcpu/traces/predict")
@_TRACE
@runs_option
@json_option
def show(trace: Path, out: Path | None, as_json: bool) -> int:
    """Show a TRACE: calls with tensors, assigned values and backend."""
    from hil.controller.workloads.traces.stored import describe_trace, load_one

    found, folder = load_one(trace, out)
    return answer(as_json, describe_trace(found, folder), str(found))
