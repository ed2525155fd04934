"""Run verdict cases with `hil run`, `hil suite`, pytest and `hil bundle`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.testing import CliRunner

import hil as library
from hil.controller.cli.main import cli
from hil.controller.pipeline.records.record import record_case
from hil.controller.pipeline.settings.options import RunSettings, flag_of, list_specs
from hil.errors import HilError, UsageError
from support.commands import Ended
from support.plugin_runs import Project, Run
from support.verdict_cases import VerdictCase

_HW_TYPE = "--runtime-hw-type"
USAGE = "usage error"


def pairs_of(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each flag with its value; a flag without a value gets an empty text."""
    for place, text in enumerate(options):
        if text.startswith("--"):
            following = options[place + 1] if place + 1 < len(options) else ""
            yield text, "" if following.startswith("--") else following


def library_arguments(options: Sequence[str]) -> dict[str, Any]:
    """Return the keyword arguments of :func:`hil.run` for options of `hil run`."""
    found: dict[str, Any] = {}
    by_flag = {flag_of(name, spec): (name, spec) for name, spec in list_specs(RunSettings).items()}
    for flag, value in pairs_of(options):
        if flag in (_HW_TYPE, "--input", "--expected"):
            continue
        name, spec = by_flag[flag]
        if spec.repeats:
            found[name] = (*found.get(name, ()), value)
        elif isinstance(getattr(RunSettings(), name), bool):
            found[name] = True
        else:
            found[name] = value if isinstance(getattr(RunSettings(), name), str) else json.loads(value)
    for name, (_, spec) in zip(by_flag, by_flag.values(), strict=True):
        field = by_flag[name][0]
        if spec.of_text and spec.repeats and field in found:
            found[field] = spec.of_text(found[field], name)
    return found


def hw_type_of(case: VerdictCase) -> str:
    """Return the simulator that a case runs on."""
    return dict(pairs_of(case.options)).get(_HW_TYPE, "sim")


def run_case(case: VerdictCase, folder: Path, board: Any) -> tuple[str, str]:
    """Run a case with the library. Return the outcome and the record as JSON."""
    arguments = library_arguments(case.options)
    if case.expected:
        arguments["expected"] = dict(case.expected)
    try:
        model = case.build(folder)
        done = library.run(model, board, dict(case.inputs), **arguments)
    except UsageError as error:
        return USAGE, json.dumps([error.message, error.hint])
    assert done.outcome is not None
    return done.outcome.value, json.dumps(record_case(done, {}).to_json())


def shared_options(case: VerdictCase) -> tuple[str, ...]:
    """Return the options that a suite supports, with the flow instead of the runtime."""
    pairs = ((("--flow" if flag == "--runtime" else flag), value) for flag, value in pairs_of(case.options))
    return tuple(text for flag, value in pairs for text in (flag, value) if text)


def lay_out(case: VerdictCase, folder: Path) -> None:
    """Write the model with its inputs and expected outputs as suites read them."""
    made = folder / "made"
    made.mkdir(parents=True)
    model = case.build(made)
    place = folder / case.name
    shutil.copytree(model.parent, place)
    shutil.rmtree(made)
    (place / model.name).rename(place / f"{case.name}{model.suffix}")
    if case.inputs:
        np.savez(place / f"{case.name}.inputs.npz", **case.inputs)
    if case.expected:
        np.savez(place / f"{case.name}.expected.npz", **case.expected)


def run_suite(cases: Sequence[VerdictCase], folder: Path, hil: Callable[..., Ended]) -> dict[str, str]:
    """Run cases with the same options in one suite. Return name -> outcome."""
    for case in cases:
        lay_out(case, folder / "models")
    options = shared_options(cases[0])
    ended = hil("suite", "run", folder / "models", "--no-layers", "--json", *options, cwd=folder)
    return {
        case.name: _common({one["outcome"] for one in ended.document["cases"] if one["model"] == case.name})
        for case in cases
    }


def run_pytest(cases: Sequence[VerdictCase], folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Run cases with the same options in pytest. Return name -> outcome; PASS if the test passed."""
    project = Project(folder / "project", environment).set_up()
    for case in cases:
        lay_out(case, project.models)
    options = [text.replace("--", "--hil-", 1) if text.startswith("--") else text for text in shared_options(cases[0])]
    tested = project.test("--hil-no-layers", *options)
    found = {}
    for case in cases:
        names = [one for one in tested.outcomes if re.match(rf"{case.name}_(full_model|test_data_set)", one)]
        found[case.name] = _common({_outcome_in(tested, name) for name in names})
    return found


def _outcome_in(tested: Run, name: str) -> str:
    """Return PASS if a test passed, else the outcome that it reports."""
    if tested.outcomes[name] == "passed":
        return "PASS"
    return tested.properties[name].get("hil_outcome", tested.outcomes[name])


def run_bundle(case: VerdictCase, folder: Path) -> str:
    """Create a bundle of a case and run it. Return the outcome."""
    model = case.build(folder)
    given = []
    if case.inputs:
        np.savez(folder / "given.npz", **case.inputs)
        given += ["--input", folder / "given.npz"]
    if case.expected:
        np.savez(folder / "wanted.npz", **case.expected)
        given += ["--expected", folder / "wanted.npz"]
    pairs = list(pairs_of(case.options))
    create = _known("create", pairs)
    runner = CliRunner()
    bundle = folder / "case.hilb"
    made = runner.invoke(cli, ["bundle", "create", str(model), *map(str, given), *create, "-o", str(bundle)])
    if made.exception is not None and not isinstance(made.exception, SystemExit):
        return _outcome_of(made.exception)
    done = runner.invoke(cli, ["bundle", "run", str(bundle), *_known("run", pairs), "--json"])
    (record,) = json.loads(done.stdout)["cases"]
    return str(record["outcome"])


def _known(verb: str, pairs: Sequence[tuple[str, str]]) -> list[str]:
    context = click.Context(cli)
    group: Any = cli.get_command(context, "bundle")
    flags = {flag for parameter in group.get_command(context, verb).params for flag in parameter.opts}
    return [text for flag, value in pairs if flag in flags for text in (flag, value) if text]


def _outcome_of(error: BaseException) -> str:
    """Return the outcome of an error of hil. Raise other errors."""
    if isinstance(error, UsageError):
        return USAGE
    if not isinstance(error, HilError):
        raise error
    return str(error.outcome)


def _common(outcomes: set[str]) -> str:
    """Return the common outcome of all cases of a model. Different outcomes are joined."""
    return ", ".join(sorted(outcomes)) or "no case"
