"""`hil farm submit`: models, bundles or a suite into the queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.commands import command
from hil.controller.cli.farm_options import connected, priority_option, project_option, selects_option
from hil.controller.cli.options import (
    FILE,
    arithmetic_option,
    flow_option,
    given_options,
    input_options,
    iteration_options,
    json_option,
    label_option,
    options,
    reference_options,
    run_option,
    seconds,
    split_targets,
    target_program_options,
    tolerance_options,
    with_project,
)
from hil.controller.cli.screen import answer, say
from hil.controller.cli.suite import case_options
from hil.controller.farm.messages import Kind
from hil.controller.pipeline.options import CaseSettings, Job, specs_of
from hil.errors import EXIT_NOTHING_RAN, UsageError

if TYPE_CHECKING:
    from hil.controller.farm.submitting import Submitted

schedule_options = options(
    selects_option,
    click.option(
        "--board", multiple=True, metavar="NAME", help="This very board of the farm; repeats: each is a target."
    ),
    priority_option,
    click.option(
        "--timeout",
        "timeout_s",
        default=3600.0,
        show_default=True,
        metavar="S",
        callback=seconds,
        help="Most time that a job may have its board.",
    ),
    click.option(
        "--max-attempts",
        type=click.IntRange(1, 100),
        default=3,
        show_default=True,
        metavar="N",
        help="How often a job is tried where boards or hosts fail.",
    ),
    project_option,
)
_bundle_options = options(
    click.option(
        "--method", "methods", multiple=True, metavar="M", help="Of a bundle: only this entry point. Repeats."
    ),
    click.option("--key", type=FILE, metavar="PUB", help="Of a bundle: refuse it unless one of these keys signed it."),
)
_suite_options = options(
    click.option("--suite", "as_suite", is_flag=True, help="A model's file is a suite: also every layer of it."),
    flow_option("iree", repeats=True),
    case_options,
    click.option("--confirm", type=click.IntRange(min=0), default=0, metavar="N", help="Run a mismatch N more times."),
    click.option("--keep-all", is_flag=True, help="Keep the tensors of cases that passed as well."),
)
_SCHEDULE = ("selector", "board", "priority", "timeout_s", "max_attempts", "project")
# What only one kind of jobs has; each other kind refuses it.
_OF_SUITES = ("flow", "filters", "layers", "group", "layer_inputs", "merge", "confirm", "keep_all")
_OF_BUNDLES = ("methods", "key")
_OF_RUNS = (
    *("runtime", "function", "compile_flags", "inputs", "input_range", "expected", "flagfile"),
    *("dims", "seed", "recompute", "references"),
)
_OWN = {
    Kind.RUN: _OF_RUNS,
    Kind.BUNDLE: _OF_BUNDLES,
    Kind.SUITE: (*_OF_SUITES, "dims", "seed", "recompute", "references"),
}


@command(
    epilog="""\b
Examples:
  hil farm submit examples/digits/digits_cnn.onnx --select "arch=aarch64" --wait
  hil farm submit @models --flow onnxruntime --filter '*digits*'"""
)
@click.argument("words", nargs=-1, metavar="MODEL...|BUNDLE...|SUITE")
@schedule_options
@click.option("--wait", is_flag=True, help="Show what the jobs print until they end; the exit code is theirs.")
@target_program_options
@input_options
@reference_options
@tolerance_options
@arithmetic_option
@iteration_options
@run_option("timeout", "--run-timeout")
@run_option("no_fallback")
@click.option("--flagfile", type=FILE, metavar="FILE", help="An iree-run-module flag file.")
@run_option("recompute")
@label_option
@_bundle_options
@_suite_options
@json_option
def submit(words: tuple[str, ...], wait: bool, as_suite: bool, as_json: bool, **settings: Any) -> int:
    """Queue a job for each MODEL or BUNDLE, or a SUITE in as many jobs as its boards can share.

    A SUITE is `@operators`, `@models`, a folder of models, bundles, golden folders or flag files, or a file that brings
    cases (.bpte, .flagfile): each case has its own result. With --suite also a model. What the jobs need is uploaded,
    once: this machine may be switched off then. Where --flow, --runtime, --select or --board repeat, each combination
    is a target with jobs of its own; with --wait they are shown side by side in the end.
    """
    from hil.controller.cli.farm_result import wait_for, wait_for_targets
    from hil.controller.farm.submitting import kind_of
    from hil.controller.farm.submitting import submit as send

    if not words and not settings["flagfile"]:
        raise UsageError("nothing to run was named", hint="hil farm submit MODEL, or hil farm submit --help")
    kind = kind_of(words, suite=as_suite) if words else Kind.RUN
    _refuse_foreign(kind)
    if settings["timeout_s"] <= 0:
        raise UsageError("--timeout must be above 0")
    targets = split_targets(settings, "flow" if kind is Kind.SUITE else "runtime", "selector", "board")
    settings |= {name: "".join(settings[name]) for name in ("flow", "runtime")}
    logs = kind is not Kind.SUITE
    with connected() as farm:
        loads = []
        for target in targets:
            mine = {**settings, **target.options}
            how = {name: mine.pop(name) for name in _SCHEDULE}
            loads.append((_load(farm, kind, words, how, mine), how))
        load, how = loads[0]
        if not any(one.specs for one, _ in loads):
            say(f"hil: nothing to run: {words[0]} has no cases that the options choose")
            return EXIT_NOTHING_RAN
        if len(targets) > 1:
            sent = {
                target.name: send(farm, replace(one, title=f"{one.title} {target.name}"), how, say=say)
                for target, (one, how) in zip(targets, loads, strict=True)
                if one.specs
            }
            if wait:
                return wait_for_targets(farm, sent, logs=logs, as_json=as_json)
            return _answer_targets(as_json, sent)
        done = send(farm, load, how, say=say)
        if wait:
            return wait_for(farm, done.submission, done.jobs, logs=logs, as_json=as_json)
    count = f" ({len(done.jobs)} jobs)" if len(done.jobs) > 1 else ""
    return answer(
        as_json,
        {"submission": done.submission, "jobs": done.jobs, "uploaded_bytes": done.sent},
        f"{load.title} is job {done.submission}{count}: hil farm logs {done.submission} -f",
    )


def _answer_targets(as_json: bool, sent: Mapping[str, Submitted]) -> int:
    rows = [
        {"name": name, "submission": one.submission, "jobs": one.jobs, "uploaded_bytes": one.sent}
        for name, one in sent.items()
    ]
    every = " ".join(str(one.submission) for one in sent.values())
    lines = [f"{name} is job {one.submission}" for name, one in sent.items()]
    return answer(as_json, {"targets": rows}, *lines, f"side by side, when they have ended: hil farm result {every}")


def _load(farm: Any, kind: Kind, words: tuple[str, ...], how: dict[str, Any], settings: dict[str, Any]) -> Any:
    from hil.controller.farm.submitting import load_bundles, load_models, load_suite, matching
    from hil.controller.workloads.suites.request import Request, Settings

    if kind is Kind.SUITE:
        own = {name: settings[name] for name in _OF_SUITES}
        how_cases = with_project(Settings(**{name: settings[name] for name in _typed(CaseSettings, settings)}))
        request = Request(words[0], **own, dims=settings["dims"], settings=how_cases)
        return load_suite(request, matching(farm, how["selector"], how["board"]))
    models = tuple(Path(word) for word in words)
    named = {name: settings[name] for name in _typed(Job, settings)}
    job = with_project(Job(models=models, flagfile=settings["flagfile"], **named))
    if kind is Kind.BUNDLE:
        return load_bundles(job, settings["methods"], settings["key"])
    return load_models(job)


def _typed(kind: type[CaseSettings], settings: dict[str, Any]) -> set[str]:
    """The fields of a settings class that are options of this verb."""
    return specs_of(kind).keys() & settings.keys()


def _refuse_foreign(kind: Kind) -> None:
    """Refuse options that say nothing of this kind of jobs."""
    foreign = {name for names in _OWN.values() for name in names} - set(_OWN[kind])
    for name, option in given_options().items():
        if name in foreign:
            what = {Kind.RUN: "models", Kind.BUNDLE: "bundles", Kind.SUITE: "suites"}[kind]
            hint = "--suite makes one of a model" if kind is Kind.RUN and name in _OF_SUITES else ""
            raise UsageError(f"{option} is not for {what}", hint=hint)
