"""`hil suite`: run suites of cases through a flow, compare runs, and update expected failures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.automatic_history import add_to_history
from hil.controller.cli.commands import group
from hil.controller.cli.options import (
    FILE,
    FOLDER,
    SSH,
    add_project_settings,
    arithmetic_option,
    boards_options,
    cache_options,
    choose_profiled_counts,
    combine_options,
    fault_option,
    flow_runtime_option,
    group_option,
    is_default_flow,
    iteration_options,
    json_option,
    known_option,
    label_option,
    make_flow_option,
    profile_options,
    refuse_with_resume,
    run_option,
    run_options,
    split_targets,
    tolerance_options,
    verbose_option,
    wait_option,
)
from hil.controller.cli.screen import SuiteScreen, answer, answer_matrix, print_message
from hil.controller.cli.usage.candidates import choose_names, complete_runtimes
from hil.core.examples import locate_example
from hil.errors import EXIT_NOTHING_RAN, EXIT_OK, UsageError

if TYPE_CHECKING:
    from hil.controller.workloads.matrix.targets import MatrixTarget
    from hil.controller.workloads.triage.entries import TriageList

_complete_source = choose_names("@operators", "@models", files=True)
# Options that select a suite's cases: fields of hil.controller.workloads.suites.request.SuiteRequest.
case_options = combine_options(
    click.option(
        "--filter",
        "filters",
        multiple=True,
        metavar="PATTERN",
        help="Select cases with a matching ID: wildcards, part of an ID, or =ID. Repeatable.",
    ),
    click.option("--layers/--no-layers", default=True, show_default=True, help="Also run each layer as a case."),
    group_option,
    click.option(
        "--layer-inputs",
        type=click.Choice(["real", "random"]),
        default="real",
        show_default=True,
        help="Layer inputs: the reference's values, or random values in their range.",
    ),
    click.option(
        "--merge",
        type=click.Choice(["content", "shape", "none"]),
        default="content",
        show_default=True,
        help="Layers to merge into one case: equal content (weights and inputs), equal shapes, or none.",
    ),
    click.option("--no-merge", "merge", flag_value="none", help="Same as --merge none."),
)
suite_options = combine_options(case_options, run_option("dims"))


@group(epilog="Example: hil suite run @models --flow iree")
def suite() -> None:
    """Run suites of models and layers, maintain expected failures, and compare runs."""


@suite.command(
    epilog="""\b
Examples:
  hil suite run @operators --flow onnxruntime --filter 'conv*' --out hil-suites/conv
  hil suite run @models --flow iree --flow onnxruntime --runtime-hw-type sim --runtime-hw-type sim-f16"""
)
@click.argument("source", required=False, metavar="@operators|@models|PATH", shell_complete=_complete_source)
@make_flow_option("iree", repeats=True)
@flow_runtime_option
@run_options("compile_flags")
@suite_options
@click.option("--only-expected-failures", is_flag=True, help="Only run the expected failures in expected.toml.")
@known_option
@boards_options
@click.option(
    "-j",
    "jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Parallel compilations (default: cores). With --board farm:..., parallel boards (default: 1).",
)
@run_options("seed", "input_range", "references", "require_independent")
@tolerance_options
@arithmetic_option
@iteration_options
@run_options("timeout", "no_fallback", "energy")
@wait_option
@click.option(
    "--confirm",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Rerun mismatches N times, on the same and a different board, to detect flaky cases and bad boards.",
)
@click.option("--keep-all", is_flag=True, help="Also store the tensors of passed cases.")
@cache_options
@verbose_option
@profile_options
@fault_option
@label_option
@click.option("--out", type=FILE, metavar="DIR", help="Directory for the run (default: hil-suites/...).")
@click.option("--resume", type=FILE, metavar="DIR", help="Continue an interrupted run.")
@json_option
def run(
    source: str | None, as_json: bool, out: Path | None, resume: Path | None, known: TriageList | None, **settings: Any
) -> int:
    """Run a suite: the ONNX node tests, hil's models, or the models at PATH and all their layers.

    Results are stored continuously in the run's directory: results.jsonl, then CSV, JUnit, Markdown and HTML. With
    multiple values of --flow, --runtime or --runtime-hw-type, or of --board with --each-board, each combination is a
    target with a separate run in that directory. The report has a row per case and a column per target.
    """
    from hil.controller.storage.runs import MATRIX
    from hil.controller.storage.screen.console import Console
    from hil.controller.workloads.suites.job import resume_suite, run_suite
    from hil.controller.workloads.suites.reports.summary import print_summary

    if (source is None) == (resume is None):
        raise UsageError(
            "a suite or --resume is required", hint="for example hil suite run @models; see hil suite run --help"
        )
    if resume is not None:
        refuse_with_resume("resume", "as_json", "known")
    settings |= choose_profiled_counts(settings)
    targets = _list_targets(settings)
    with SuiteScreen(quiet=as_json) as screen:
        if len(targets) > 1:
            from hil.controller.workloads.matrix.workloads import run_suite_matrix

            request = _request(str(source), settings)
            made = run_suite_matrix(request, targets, out=out, screen=screen, known=known)
            add_to_history(made[0])
            return answer_matrix(as_json, *made)
        if resume is not None and (resume / MATRIX).exists():
            from hil.controller.workloads.matrix.workloads import resume_suite_matrix

            made = resume_suite_matrix(resume, screen=screen, known=known)
            add_to_history(made[0])
            return answer_matrix(as_json, *made)
        if resume is not None:
            stored = resume_suite(resume, screen=screen, known=known)
        else:
            stored = run_suite(_request(str(source), settings), out=out, screen=screen, known=known)
    add_to_history(stored.folder)
    if as_json:
        return answer(True, stored.to_document())
    if stored.head.ids:
        print_summary(Console(), stored.folder)
    else:
        chosen = " that match the options" if stored.head.suite_ids else ""
        print_message(f"hil: no cases ran: {stored.head.source} has no cases{chosen}")
    return stored.head.exit_code or 0


def _list_targets(settings: dict[str, Any]) -> tuple[MatrixTarget, ...]:
    """Return the targets of repeated options.

    Without --each-board multiple boards are a single target and share the cases.
    """
    each = settings.pop("each_board")
    boards = settings["board"] = settings["boards"] if each else ()
    targets = split_targets(settings, "flow", "runtime", "board", "hw_type")
    settings["boards"] = settings["boards"] if len(boards) < 2 else ()
    del settings["board"]
    return targets


def _request(source: str, settings: dict[str, Any]) -> Any:
    from hil.controller.pipeline.settings.options import CaseSettings, list_specs
    from hil.controller.workloads.suites.request import Settings, SuiteRequest

    ssh = {name: settings.pop(name) for name in SSH}
    folders = {"run": settings.pop("profile"), "compile": settings.pop("compile_time_profile")}
    profiles = {kind: str(folder.absolute()) for kind, folder in folders.items() if folder}
    if len(profiles) > len(set(profiles.values())):
        raise UsageError("--profile and --compile-time-profile need different directories")
    names = list_specs(CaseSettings)
    how = add_project_settings(Settings(**{name: settings.pop(name) for name in names}, profile="run" in profiles))
    given = {key: str(value.absolute()) if isinstance(value, Path) else value for key, value in ssh.items() if value}
    return SuiteRequest(
        locate_example(source),
        **settings,
        is_default_flow=is_default_flow(),
        ssh=given,
        settings=how,
        profiles=profiles,
    )


@suite.command("list", epilog="Example: hil suite list @operators --filter 'conv*'")
@click.argument("source", metavar="@operators|@models|PATH", shell_complete=_complete_source)
@make_flow_option("iree")
@click.option(
    "--runtime",
    default="",
    metavar="NAME",
    help="Runtime (default: the flow's).",
    shell_complete=complete_runtimes,
)
@suite_options
@json_option
def list_cases(source: str, as_json: bool, flow: str, **settings: Any) -> int:
    """List a suite's cases. PATH is a model, or a directory of models."""
    from hil.controller.records.commands.models import CaseList, ListedCase
    from hil.controller.storage.run_context import open_context
    from hil.controller.workloads.suites.cases.sources import choose_flow, open_suite
    from hil.controller.workloads.suites.request import SuiteRequest

    request = SuiteRequest(locate_example(source), flow, **settings, is_default_flow=is_default_flow())
    with open_context() as context:
        found = open_suite(request, choose_flow(request), context)
    cases = [spec for spec in found.cases if request.selects(spec.id)]
    code = EXIT_OK if cases else EXIT_NOTHING_RAN
    for line in (
        *(f"left out: {one}" for one in found.left_out),
        *request.list_remarks([one.id for one in found.cases]),
    ):
        print_message(line)
    if not found.cases:
        print_message(f"hil: {source} has no cases")
    rows = [ListedCase(id=one.id, model=one.model, layer=one.layer, op=one.op) for one in cases]
    return answer(as_json, CaseList(suite=found.name, cases=rows, exit_code=code), *(one.id for one in cases))


@suite.command(epilog="Example: hil suite expect hil-suites/latest-run --update")
@click.argument("folder", type=FOLDER, metavar="RUN")
@click.option("--update", is_flag=True, help="Rewrite the file (default: show the changes).")
@click.option("--file", "path", type=FILE, metavar="FILE", help="File to update (default: the suite's file).")
def expect(folder: Path, update: bool, path: Path | None) -> None:
    """Update the list of expected failures from a RUN.

    hil keeps the reasons and issues of entries, and removes cases that now pass. Cases, flows and boards that are not
    in the RUN do not change.
    """
    from hil.controller.workloads.suites.job import expect_from

    text = expect_from(folder, path, update=update)
    click.echo(text.rstrip() or "no changes")


@suite.command(epilog="Example: hil suite diff hil-suites/monday hil-suites/tuesday --json")
@click.argument("first", type=FOLDER, metavar="RUN1")
@click.argument("second", type=FOLDER, metavar="RUN2")
@click.option("--markdown", is_flag=True, help="Print Markdown, for a CI job's summary.")
@json_option
def diff(first: Path, second: Path, markdown: bool, as_json: bool) -> int:
    """Compare RUN1 with RUN2: broken and fixed cases, and changed numbers.

    Exits with 1 if a case broke, or a new case fails.
    """
    from hil.controller.storage.screen.console import Console
    from hil.controller.workloads.suites.reports.diff import compare_runs, format_diff_markdown, print_diff, record_diff

    found = compare_runs(first, second)
    document = record_diff(found)
    if markdown:
        return answer(as_json, document, format_diff_markdown(found))
    return answer(as_json, document, show=lambda: print_diff(Console(), found))


@suite.command(epilog="Example: hil suite matrix hil-suites/sim hil-suites/rpi5 --out both")
@click.argument("folders", nargs=-1, required=True, type=FOLDER, metavar="RUN...")
@click.option("--out", type=FOLDER, metavar="DIR", help="Write matrix.csv, .md and .html, and junit.xml to DIR.")
@click.option("--markdown", is_flag=True, help="Print Markdown, for a CI job's summary.")
@json_option
def matrix(folders: tuple[Path, ...], out: Path | None, markdown: bool, as_json: bool) -> int:
    """Compare stored RUNs in a table: a row per case, a column per run, with differing rows marked.

    A RUN is a result of `hil suite run`, `hil run`, `hil bundle run` or pytest's --hil-out. A matrix counts as a RUN
    for each of its targets. Exits with the most severe exit code of the runs.
    """
    from hil.controller.workloads.matrix.files import format_matrix_markdown, write_matrix
    from hil.controller.workloads.matrix.report import combine_runs

    report = combine_runs(folders)
    if out is not None:
        write_matrix(report, out)
    if markdown and not as_json:
        click.echo(format_matrix_markdown(report))
        return report.exit_code
    return answer_matrix(as_json, out, report)


@suite.command(epilog="Example: hil suite report hil-suites/monday")
@click.argument("folder", type=FOLDER, metavar="RUN")
def report(folder: Path) -> None:
    """Regenerate a RUN's reports from its results, and show its summary. A RUN may be a matrix."""
    from hil.controller.storage.runs import MATRIX
    from hil.controller.storage.screen.console import Console
    from hil.controller.workloads.suites.reports import write_reports
    from hil.controller.workloads.suites.reports.summary import print_summary

    if (folder / MATRIX).exists():
        from hil.controller.workloads.matrix.files import write_matrix
        from hil.controller.workloads.matrix.report import load_matrix

        found = load_matrix(folder)
        write_matrix(found, folder)
        answer_matrix(False, folder, found)
        return
    write_reports(folder)
    print_summary(Console(), folder)
