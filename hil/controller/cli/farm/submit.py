"""`hil farm submit`: queue models, bundles or a suite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.commands import CliCommand
from hil.controller.cli.farm.board_requests import count_option, list_board_requests
from hil.controller.cli.farm.options import connect_farm, priority_option, project_option, selects_option
from hil.controller.cli.options import (
    FILE,
    add_project_settings,
    arithmetic_option,
    check_seconds,
    choose_profiled_counts,
    combine_options,
    generate_option,
    input_options,
    instructions_option,
    iteration_options,
    json_option,
    label_option,
    list_given_options,
    make_flow_option,
    reference_options,
    run_option,
    split_targets,
    target_program_options,
    tolerance_options,
)
from hil.controller.cli.running.suite import case_options
from hil.controller.cli.screen import answer, print_message
from hil.controller.cli.usage.candidates import complete_models
from hil.controller.farm.messages import Kind
from hil.controller.pipeline.settings.options import CaseSettings, Job, list_specs
from hil.controller.records.commands.farm import SubmittedJobs, SubmittedTarget, SubmittedTargets
from hil.core.examples import locate_example
from hil.errors import EXIT_NOTHING_RAN, UsageError

if TYPE_CHECKING:
    from hil.controller.farm.client.submitting import SubmitReceipt

# Key for the words after `--` in a command's context.
COMMAND = "hil.command"


class SubmitCommand(CliCommand):
    """Command whose words after `--` are a command for a board's host."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words before `--`, and keep the words after it unchanged."""
        if "--" in args:
            ctx.meta[COMMAND] = tuple(args[args.index("--") + 1 :])
            args = args[: args.index("--")]
        return super().parse_args(ctx, args)


schedule_options = combine_options(
    selects_option,
    click.option(
        "--board",
        multiple=True,
        metavar="NAME",
        help="Board of the farm; repeatable: each value is a target, or for a command a further board.",
    ),
    priority_option,
    click.option(
        "--timeout",
        "timeout_s",
        default=3600.0,
        show_default=True,
        metavar="S",
        callback=check_seconds,
        help="Maximum time that a job may use a board.",
    ),
    click.option(
        "--max-attempts",
        type=click.IntRange(1, 100),
        default=3,
        show_default=True,
        metavar="N",
        help="Maximum attempts per job if boards or hosts fail.",
    ),
    project_option,
)
_profile_options = combine_options(
    click.option(
        "--profile",
        is_flag=True,
        help="For models: also run under the runtime's profiler, and store the profile and trace with the results.",
    ),
    click.option(
        "--compile-time-profile",
        is_flag=True,
        help="For models: also profile the compiler, and store the profile with the results.",
    ),
)
_bundle_options = combine_options(
    click.option(
        "--method", "methods", multiple=True, metavar="M", help="For bundles: run only this entry point. Repeatable."
    ),
    click.option("--key", type=FILE, metavar="PUB", help="For bundles: require a signature by a key in this file."),
)
_command_options = combine_options(
    click.option(
        "--send",
        "sent",
        type=FILE,
        multiple=True,
        metavar="FILE",
        help="For commands: copy FILE to the directory of CMD.",
    ),
    click.option("--keep", multiple=True, metavar="GLOB", help="For commands: store these files of CMD's directory."),
    count_option,
)
_suite_options = combine_options(
    click.option("--suite", "as_suite", is_flag=True, help="Run a model file as a suite, with all layers."),
    make_flow_option("iree", repeats=True),
    case_options,
    click.option("--confirm", type=click.IntRange(min=0), default=0, metavar="N", help="Rerun mismatches N times."),
    click.option("--keep-all", is_flag=True, help="Also store the tensors of passed cases."),
)
_SCHEDULE = ("selector", "board", "priority", "timeout_s", "max_attempts", "project")
# Options for only some job kinds. Other kinds reject these options.
_OF_SUITES = ("flow", "filters", "layers", "group", "layer_inputs", "merge", "confirm", "keep_all")
_OF_BUNDLES = ("methods", "key")
# Options of both models and suites, but not of bundles.
_OF_MODELS = ("runtime", "compile_flags", "input_range", "dims", "seed", "recompute", "references")
_OF_PROFILES = ("profile", "compile_time_profile")
_OF_RUNS = ("function", "inputs", "expected", "flagfile", "generate", "instructions", *_OF_PROFILES, *_OF_MODELS)
_OWN = {
    Kind.RUN: _OF_RUNS,
    Kind.BUNDLE: _OF_BUNDLES,
    Kind.SUITE: (*_OF_SUITES, *_OF_MODELS),
}


@click.command(
    cls=SubmitCommand,
    epilog="""\b
Examples:
  hil farm submit example:digits_cnn --select "arch=aarch64" --wait
  hil farm submit @models --flow onnxruntime --filter '*digits*'
  hil farm submit --send flash.sh --send image.bin --keep '*.log' --wait -- ./flash.sh image.bin
  hil farm submit --board rpi5-1 --board rpi5-2 --send link_test.py --wait -- python link_test.py""",
)
@click.argument("words", nargs=-1, metavar="MODEL...|BUNDLE...|SUITE|-- CMD...", shell_complete=complete_models)
@schedule_options
@click.option("--wait", is_flag=True, help="Show output until the jobs end, and exit with their exit code.")
@target_program_options
@input_options
@generate_option
@reference_options
@tolerance_options
@arithmetic_option
@iteration_options
@instructions_option
@run_option("timeout", "--run-timeout")
@run_option("no_fallback")
@run_option("energy")
@_profile_options
@click.option("--flagfile", type=FILE, metavar="FILE", help="Flag file of iree-run-module.")
@run_option("recompute")
@label_option
@_command_options
@_bundle_options
@_suite_options
@json_option
def submit(words: tuple[str, ...], wait: bool, as_suite: bool, as_json: bool, **settings: Any) -> int:
    """Queue a job for each MODEL or BUNDLE, or a SUITE as several jobs for its boards.

    A SUITE is `@operators`, `@models`, a directory of models, bundles, golden directories or flag files, or a file with
    cases (.bpte, .flagfile); with --suite also a model. Each case has a separate result. Job files are uploaded once,
    so this machine may then go offline. With several values of --flow, --runtime, --select or --board, each combination
    is a target with separate jobs; --wait ends with a table of all targets.

    CMD runs on the board's host with the board leased, for users with the right `commands`. HIL_BOARD is the board's
    config, HIL_BOARD_NAME its name. The exit code of CMD is the job's. With several boards, CMD starts when all of them
    are leased: HIL_BOARDS has their configs in order.
    """
    from hil.controller.cli.farm.result import wait_for, wait_for_targets
    from hil.controller.farm.client.submitting import choose_kind
    from hil.controller.farm.client.submitting import submit as send

    sent, keep, count = settings.pop("sent"), settings.pop("keep"), settings.pop("count")
    command = click.get_current_context().meta.get(COMMAND)
    if command is not None:
        return _submit_command(command, words, sent, keep, count, settings, wait=wait, as_json=as_json)
    if option := next(
        (option for name, option in list_given_options().items() if name in ("sent", "keep", "count")), ""
    ):
        raise UsageError(f"{option} applies only to commands", hint="hil farm submit --keep GLOB -- CMD...")
    if not words and not settings["flagfile"]:
        raise UsageError("no model, bundle or suite specified", hint="hil farm submit MODEL, or hil farm submit --help")
    words = tuple(map(locate_example, words))
    kind = choose_kind(words, suite=as_suite) if words else Kind.RUN
    _refuse_foreign(kind)
    if settings["timeout_s"] <= 0:
        raise UsageError("--timeout must be above 0")
    if kind is Kind.SUITE and "runtime" not in list_given_options():
        settings["runtime"] = ()  # the project file's runtime does not replace the flow's runtime
    settings |= _choose_profiles(settings)
    targets = split_targets(settings, *(["flow"] if kind is Kind.SUITE else []), "runtime", "selector", "board")
    settings |= {name: "".join(settings[name]) for name in ("flow", "runtime")}
    logs = kind is not Kind.SUITE
    with connect_farm() as farm:
        loads = []
        for target in targets:
            mine = {**settings, **target.options}
            how = {name: mine.pop(name) for name in _SCHEDULE}
            loads.append((_load(farm, kind, words, how, mine), how))
        load, how = loads[0]
        if not any(one.specs for one, _ in loads):
            print_message(f"hil: no cases to run: no case of {words[0]} matches the options")
            return EXIT_NOTHING_RAN
        if len(targets) > 1:
            sent = {
                target.name: send(farm, one.for_target(target.name), how, say=print_message)
                for target, (one, how) in zip(targets, loads, strict=True)
                if one.specs
            }
            if wait:
                return wait_for_targets(farm, sent, logs=logs, as_json=as_json)
            return _answer_targets(as_json, sent)
        done = send(farm, load, how, say=print_message)
        if wait:
            return wait_for(farm, done.submission, done.jobs, logs=logs, as_json=as_json)
    count = f" ({len(done.jobs)} jobs)" if len(done.jobs) > 1 else ""
    return answer(
        as_json,
        SubmittedJobs(submission=done.submission, jobs=done.jobs, uploaded_bytes=done.sent),
        f"{load.title} is job {done.submission}{count}: hil farm logs {done.submission} -f",
    )


def _submit_command(
    command: tuple[str, ...],
    words: tuple[str, ...],
    sent: tuple[Path, ...],
    keep: tuple[str, ...],
    count: int,
    settings: dict[str, Any],
    *,
    wait: bool,
    as_json: bool,
) -> int:
    """Queue a command that uses all given boards at the same time."""
    from hil.controller.cli.farm.result import wait_for
    from hil.controller.farm.client.command_submission import load_command
    from hil.controller.farm.client.submitting import submit as send

    if words:
        raise UsageError(
            f"{words[0]!r} before -- has no effect: a command needs no model", hint="add files with --send"
        )
    if not command:
        raise UsageError("missing command after --", hint="hil farm submit -- CMD...")
    given = list_given_options()
    for name, option in given.items():
        if name not in (*_SCHEDULE, "wait", "sent", "keep", "count", "as_json"):
            raise UsageError(f"{option} does not apply to commands")
    if settings["timeout_s"] <= 0:
        raise UsageError("--timeout must be above 0")
    how = {name: settings[name] for name in _SCHEDULE}
    first, *more = list_board_requests(how["board"], how["selector"], count)
    how |= {"selector": first.selector, "board": first.board, "more": tuple(more)}
    # A command may have an effect before a board or a host fails, so do not repeat it without a request.
    how["max_attempts"] = how["max_attempts"] if "max_attempts" in given else 1
    load = load_command(command, sent, keep)
    with connect_farm() as farm:
        done = send(farm, load, how, say=print_message)
        if wait:
            return wait_for(farm, done.submission, done.jobs, logs=True, as_json=as_json)
    return answer(
        as_json,
        SubmittedJobs(submission=done.submission, jobs=done.jobs, uploaded_bytes=done.sent),
        f"{load.title} is job {done.submission}: hil farm logs {done.submission} -f",
    )


def _answer_targets(as_json: bool, sent: Mapping[str, SubmitReceipt]) -> int:
    rows = [
        SubmittedTarget(name=name, submission=one.submission, jobs=one.jobs, uploaded_bytes=one.sent)
        for name, one in sent.items()
    ]
    every = " ".join(str(one.submission) for one in sent.values())
    lines = [f"{name} is job {one.submission}" for name, one in sent.items()]
    return answer(
        as_json,
        SubmittedTargets(targets=rows),
        *lines,
        f"for a table of results, after the jobs end: hil farm result {every}",
    )


def _load(farm: Any, kind: Kind, words: tuple[str, ...], how: dict[str, Any], settings: dict[str, Any]) -> Any:
    from hil.controller.farm.client.submitting import count_matching_boards, load_bundles, load_models, load_suite
    from hil.controller.workloads.suites.request import Settings, SuiteRequest

    if kind is Kind.SUITE:
        own = {name: settings[name] for name in _OF_SUITES}
        how_cases = add_project_settings(
            Settings(**{name: settings[name] for name in _list_typed(CaseSettings, settings)})
        )
        own |= {name: settings[name] for name in ("runtime", "dims")}
        request = SuiteRequest(words[0], **own, settings=how_cases)
        return load_suite(request, count_matching_boards(farm, how["selector"], how["board"]))
    models = tuple(Path(word) for word in words)
    named = {name: settings[name] for name in _list_typed(Job, settings)}
    named |= {name: settings[name] for name in _OF_PROFILES}
    job = add_project_settings(Job(models=models, flagfile=settings["flagfile"], **named))
    if kind is Kind.BUNDLE:
        return load_bundles(job, settings["methods"], settings["key"])
    return load_models(job)


def _choose_profiles(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a profiled run. The host chooses the directories, which are part of the result."""
    profiles = {name: Path(name) if settings[name] else None for name in _OF_PROFILES}
    return {**profiles, **choose_profiled_counts(profiles)}


def _list_typed(kind: type[CaseSettings], settings: dict[str, Any]) -> set[str]:
    """Return the settings class's fields that are options of this command."""
    return list_specs(kind).keys() & settings.keys()


def _refuse_foreign(kind: Kind) -> None:
    """Raise UsageError for options that do not apply to this kind of job."""
    foreign = {name for names in _OWN.values() for name in names} - set(_OWN[kind])
    for name, option in list_given_options().items():
        if name in foreign:
            what = {Kind.RUN: "models", Kind.BUNDLE: "bundles", Kind.SUITE: "suites"}[kind]
            hint = "--suite runs a model as a suite" if kind is Kind.RUN and name in _OF_SUITES else ""
            raise UsageError(f"{option} does not apply to {what}", hint=hint)
