"""`hil profile`: show, query, compare and merge profiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.analysis.node_data import export_values, make_node_data_options
from hil.controller.cli.commands import group
from hil.controller.cli.options import MODEL, check_seconds, combine_options, json_option, run_options, runs_option
from hil.controller.cli.screen import answer
from hil.controller.cli.usage.candidates import complete_runs
from hil.core.scratch import make_temporary_folder
from hil.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from hil.core.timeline import Profile


_FILE = click.Path(path_type=Path, dir_okay=False)

# Options that select a profile among several, and the directory with stored runs.
_choice = combine_options(
    click.option("--case", default="", metavar="NAME", help="Model, if the run has more than one."), runs_option
)
_top = click.option("--top", default=20, show_default=True, type=click.IntRange(min=1), help="Number of rows to show.")
_by = click.option(
    "--by",
    type=click.Choice(["op", "node", "type"]),
    default="op",
    show_default=True,
    help="Group by runtime operation, ONNX node, or node type.",
)
_plot = click.option("--plot", type=_FILE, metavar="FILE", help="Also plot to FILE: .png, .svg or .pdf.")


@group(epilog="Example: hil profile show latest")
def profile() -> None:
    """View profiles of `hil run --profile`.

    RUN is a profile directory, a trace file, or a stored run: ID, start of an ID, or `latest`.
    """


def _find(text: str, case: str, out: Path | None) -> Path:
    from hil.controller.analysis.profile.store import find_profile
    from hil.controller.storage.runs import RunStore

    return find_profile(text, case, store=RunStore(out))


def _read(text: str, case: str, out: Path | None) -> Profile:
    from hil.controller.analysis.profile.store import find_folder, read_profile

    return read_profile(find_folder(_find(text, case, out)))


@profile.command("open", epilog="Example: hil profile open latest")
@click.argument("run", metavar="RUN", shell_complete=complete_runs)
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port to listen on (default: any free port).")
@click.option("--no-browser", is_flag=True, help="Print the address without opening a browser.")
@_choice
def open_profile(run: str, port: int, no_browser: bool, case: str, out: Path | None) -> None:
    """Show a trace in Perfetto's UI, served locally until Ctrl-C.

    No data leaves this machine. To view it from another machine: ssh -L PORT:127.0.0.1:PORT HOST, with this --port.
    """
    import threading
    import webbrowser

    from hil.controller.analysis.profile.perfetto import TraceViewer, has_screen
    from hil.controller.analysis.profile.store import read_title, trace_of

    found = _find(run, case, out)
    trace = trace_of(found)
    with TraceViewer(trace, title=read_title(found), port=port) as viewer:
        click.echo(f"{trace} is shown at {viewer.address}\nStop with Ctrl-C.")
        if not no_browser and has_screen():
            # Some browsers block the terminal until they exit.
            threading.Thread(target=webbrowser.open, args=[viewer.address], daemon=True).start()
        viewer.serve()


@profile.command(epilog="Example: hil profile show latest --by type --plot profile.png")
@click.argument("run", metavar="RUN", shell_complete=complete_runs)
@_top
@_by
@_plot
@_choice
@json_option
def show(run: str, top: int, by: str, plot: Path | None, case: str, out: Path | None, as_json: bool) -> None:
    """Show a run's time per operation, or a compilation's time per phase."""
    from hil.controller.analysis.profile import show as shown
    from hil.controller.analysis.profile.compilation.compile_totals import is_compile_profile
    from hil.controller.storage.screen.console import make_table_console

    folder = _find(run, case, out)
    if is_compile_profile(folder):
        if as_json or plot:
            raise UsageError("compilation profiles do not support --json and --plot", hint=f"see {folder}/*.csv")
        shown.print_compile_profile(make_table_console(), folder, top=top)
        return
    found = _read(run, case, out)
    if plot:
        shown.plot_profile(plot, found, by=by, top=top)
    answer(
        as_json,
        shown.summarize_profile(found, by=by, top=top, plot=plot),
        *([f"drawn in {plot}"] if plot else ()),
        show=lambda: shown.print_profile(make_table_console(), found, by=by, top=top),
    )


@profile.command(epilog="Example: hil profile roofline latest --plot roofline.png")
@click.argument("run", metavar="RUN", shell_complete=complete_runs)
@_top
@_by
@click.option(
    "--peaks",
    default="",
    metavar="ID|FILE",
    help="Peaks: `latest`, an ID or file of hil board peak, or a board config (default: those of the profile).",
)
@_plot
@_choice
@json_option
def roofline(
    run: str, top: int, by: str, peaks: str, plot: Path | None, case: str, out: Path | None, as_json: bool
) -> None:
    """Show how close a run comes to the peaks of its board: operations, bytes, speed and limit of each operation.

    `hil board peak` measures the peaks. The peaks that a report uses are stored with the profile.
    """
    from hil.controller.analysis.profile.store import find_folder, read_profile
    from hil.controller.analysis.profile.totals import require_times
    from hil.controller.analysis.roofline.report import build_report
    from hil.controller.analysis.roofline.show import plot_roofline, print_roofline
    from hil.controller.storage.screen.console import make_table_console

    folder = find_folder(_find(run, case, out))
    require_times(read_profile(folder))
    report = build_report(folder, by=by, peaks=peaks, keep=True)
    if plot:
        plot_roofline(plot, report)
        report.plot = str(plot)
    answer(
        as_json,
        report.replace(rows=report.rows[:top]),
        *([f"drawn in {plot}"] if plot else ()),
        show=lambda: print_roofline(make_table_console(), report, top=top),
    )


@profile.command(epilog="Example: hil profile work example:digits_cnn")
@click.argument("model", type=MODEL)
@_top
@run_options("function", "dims")
@json_option
def work(model: Path, top: int, as_json: bool, **settings: Any) -> None:
    """Count the operations and bytes of an ONNX or TFLite MODEL from its shapes, without a run."""
    from hil.controller.analysis.roofline.model_work import count_model
    from hil.controller.analysis.roofline.show import print_work
    from hil.controller.models.importers import import_model
    from hil.controller.pipeline.settings.options import COMPILE_TIMEOUT_SECONDS
    from hil.controller.storage.run_context import open_context
    from hil.controller.storage.screen.console import make_table_console

    with open_context(1) as tools, make_temporary_folder("hil-work-") as scratch:
        read = import_model(model, **settings, isolated=tools.isolated, cache=tools.cache)
        log = Path(scratch) / "work.log"
        found = count_model(read, cache=tools.cache, isolated=tools.isolated, timeout=COMPILE_TIMEOUT_SECONDS, log=log)
    answer(as_json, found, show=lambda: print_work(make_table_console(), found, top=top))


@profile.command(
    epilog="""Example: hil profile query latest "select name, dur from slice order by dur desc limit 5" """
)
@click.argument("run", metavar="RUN", shell_complete=complete_runs)
@click.argument("sql", metavar="SQL")
@click.option(
    "--timeout",
    default=120.0,
    show_default=True,
    callback=check_seconds,
    metavar="S",
    help="Timeout for the whole query, in seconds.",
)
@_choice
@json_option
def query(run: str, sql: str, timeout: float, case: str, out: Path | None, as_json: bool) -> None:
    """Query a trace in SQL with Perfetto's trace processor. Requires Node.js and the extra hil[viewer].

    With multiple statements, shows the rows of the last statement.
    """
    from hil.controller.analysis.profile.perfetto import format_table, record_table
    from hil.controller.analysis.profile.perfetto import query as ask
    from hil.controller.analysis.profile.store import trace_of

    table = ask(trace_of(_find(run, case, out)), sql, timeout=timeout)
    answer(as_json, record_table(table), *filter(None, [format_table(table).removesuffix("\n")]))


@profile.command(epilog="Example: hil profile diff monday tuesday --trace both.pftrace.gz")
@click.argument("a", metavar="A", shell_complete=complete_runs)
@click.argument("b", metavar="B", shell_complete=complete_runs)
@_top
@_plot
@click.option("--trace", type=_FILE, metavar="FILE", help="Write a trace with both profiles, which start at time 0.")
@_choice
@json_option
def diff(
    a: str, b: str, top: int, plot: Path | None, trace: Path | None, case: str, out: Path | None, as_json: bool
) -> None:
    """Compare the time per operation of two RUNs, A and B, and list the slower and faster operations of B."""
    from hil.controller.analysis.profile.diff import compare_profiles
    from hil.controller.analysis.profile.show import plot_diff, print_diff
    from hil.controller.analysis.profile.trace import write_comparison
    from hil.controller.storage.screen.console import make_table_console

    before, after = _read(a, case, out), _read(b, case, out)
    found = compare_profiles(before, after)
    if plot:
        plot_diff(plot, found, top=top)
    if trace:
        write_comparison(before, after, trace)
    answer(
        as_json,
        found.record(plot, trace),
        *(f"written: {path}" for path in (plot, trace) if path),
        show=lambda: print_diff(make_table_console(), found, top=top),
    )


@profile.command(epilog="Example: hil profile merge rpi4 rpi5 --trace boards.pftrace.gz")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_runs)
@click.option(
    "--trace", required=True, type=_FILE, metavar="FILE", help="Trace file to write: .pftrace or .pftrace.gz."
)
@_choice
@json_option
def merge(runs: tuple[str, ...], trace: Path, case: str, out: Path | None, as_json: bool) -> None:
    """Merge multiple profiles of this machine into one trace on the machine's clock, with a process group per board."""
    from hil.controller.analysis.profile.trace import write_trace
    from hil.controller.records.commands.stored import MergedProfile, MergedTrace

    found = [_read(run, case, out) for run in runs]
    cost = write_trace(found, trace)
    described = [MergedProfile(run=one.run, model=one.model, board=one.board) for one in found]
    document = MergedTrace(profiles=described, trace=str(trace), **vars(cost))
    answer(as_json, document, f"written: {trace}, {cost.events} events")


@profile.command(epilog="Example: hil profile export latest --node-data times.json --model net.onnx")
@click.argument("run", metavar="RUN", shell_complete=complete_runs)
@make_node_data_options("time_ns", required=True)
@click.option(
    "--model",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="ONNX model that provides names for the graph and for unnamed nodes.",
)
@_choice
@json_option
def export(run: str, node_data: Path, by: str, model: Path | None, case: str, out: Path | None, as_json: bool) -> None:
    """Export each node's time for Model Explorer, which colors the model's graph by these times.

    The time of a fused operation cannot be divided: each of its nodes gets the full time.
    """
    from hil.controller.analysis.graphs.dispatches import sum_operations
    from hil.controller.analysis.graphs.values import map_totals
    from hil.controller.analysis.profile.totals import require_times
    from hil.controller.records.commands.stored import NodeDataFile

    found = _read(run, case, out)
    require_times(found)
    values = map_totals(sum_operations(found.rows))
    count = export_values(values, node_data, by, model)
    document = NodeDataFile(node_data=str(node_data), nodes=count)
    answer(as_json, document, f"written: {node_data}, {count} nodes")


@profile.command(epilog="Example: hil profile npu net_int8.tflite latest --accelerator ethos-u55-256")
@click.argument("model", metavar="MODEL", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("run", metavar="[RUN]", default="", shell_complete=complete_runs)
@click.option(
    "--accelerator",
    default="ethos-u55-128",
    show_default=True,
    metavar="NAME",
    help="Configuration of the NPU: ethos-u55-32 to ethos-u85-2048.",
)
@_choice
@json_option
def npu(model: Path, run: str, accelerator: str, case: str, out: Path | None, as_json: bool) -> None:
    """Estimate the cycles of a TFLite model on an Arm Ethos-U NPU with Vela. Requires the extra hil[vela].

    With RUN, a profile of the model on an emulated microcontroller, the table also has the measured ticks.
    """
    from hil.controller.analysis.profile.ticks.matching import add_ticks
    from hil.controller.analysis.profile.ticks.show_npu import print_estimate
    from hil.controller.analysis.profile.ticks.vela import ACCELERATORS, estimate_cycles
    from hil.controller.storage.screen.console import make_table_console

    if accelerator not in ACCELERATORS:
        hint = f"{did_you_mean(accelerator, ACCELERATORS)}expected one of {', '.join(ACCELERATORS)}"
        raise UsageError(f"unknown accelerator {accelerator!r}", hint=hint)
    measured = _read(run, case, out) if run else None
    found = estimate_cycles(model, accelerator)
    if measured is not None:
        found = add_ticks(found, measured)
    answer(as_json, found, show=lambda: print_estimate(make_table_console(), found))


@profile.command("import", epilog="Example: hil profile import run.etdp -o from-phone --model mobilenet --board phone")
@click.argument("file", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Directory for the profile.",
)
@click.option("--model", default="", metavar="NAME", help="Model name (default: the file's name).")
@click.option("--board", default="elsewhere", show_default=True, metavar="NAME", help="Board name.")
@click.option(
    "--unit",
    type=click.Choice(["ns", "us", "ms", "s"]),
    default="ns",
    show_default=True,
    help="Time unit in the file, if the runtime uses a custom clock.",
)
@json_option
def import_profile(file: Path, out: Path, model: str, board: str, unit: str, as_json: bool) -> None:
    """Create a profile from an ETDump of ExecuTorch's runtime on another machine, such as a phone."""
    from hil.controller.analysis.profile.collect import check_folder
    from hil.controller.analysis.profile.runtimes.etdump_profile import profile_of
    from hil.controller.analysis.profile.store import write_profile
    from hil.controller.records.commands.stored import ImportedProfile

    found = profile_of(file, model=model, board=board, unit=unit)
    check_folder(out, "run")
    write_profile(found, out)
    document = ImportedProfile(profile=str(out), model=found.model, board=board, rows=len(found.rows))
    answer(as_json, document, f"{out}: {len(found.rows)} rows; hil profile show {out}")
