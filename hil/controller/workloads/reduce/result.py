"""Write the result of a reduction: the smallest model, its tensors, a bug report and a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil.bundles import Bundle, MethodTestCase, MethodTestSuite, Signature
from hil.controller.backends.compilers.iree_program import choose_settings
from hil.controller.backends.gpu_targets import combine_flags
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.runner import Runner
from hil.controller.storage.isolation.isolated import IsolatedError
from hil.controller.storage.runs import convert_write_errors, make_safe_name, write_file
from hil.controller.storage.tensor_files import save_files
from hil.controller.workloads.bundles.methods import make_program
from hil.controller.workloads.reduce.candidates.mlir_parts import MLIR_MODEL, print_mlir
from hil.controller.workloads.reduce.candidates.simplify import print_model
from hil.controller.workloads.reduce.report import write_report
from hil.controller.workloads.reduce.stock import (
    COMPILING,
    IreeSource,
    StockScript,
    make_iree_script,
    make_iree_timing,
    make_onnxruntime_script,
    make_onnxruntime_timing,
    run_script,
)
from hil.controller.workloads.reduce.trials import Trials
from hil.core import own_version
from hil.core.files import copy_file
from hil.core.results import Artifact, Outcome
from hil.core.tensors import Array, make_spec
from hil.errors import UsageError

REPORT, BUNDLE = "report.md", "failure.hilb"
_PRINT_SECONDS = 60.0
# Seconds that a script without hil may need to compile, in addition to the timeout of a run.
_STOCK_SECONDS = 60.0


def write_result(trials: Trials, final: Case | None, signing_key: Path | None) -> None:
    """Write the files of the smallest model to the reduction's directory, and complete the record.

    Args:
        final: the final run of the smallest model. If None, only the model and the inputs are written.

    Raises:
        StorageError: the directory cannot be written.
        UsageError: the key is invalid.
    """
    record, folder, best = trials.record, trials.folder, trials.best
    if best is None:
        trials.save()
        return
    with convert_write_errors(folder):
        for file in sorted(best.model.parent.glob(f"{best.model.name}*")):
            copy_file(file, folder / file.name)
    files = {best.model.name: "the smallest model"}
    inputs = _save(folder, "inputs", best.inputs, files, "input")
    record.nodes_after = best.nodes
    if final is None:
        trials.save()
        return
    if not record.trials[-1].same:
        how = "did not fail in the same way" if record.slow is None else "was faster"
        trials.add_note(f"the last run of the smallest model {how}")
    final = _add_references(trials, final)
    outputs = final.result.outputs if final.result else {}
    _save(folder, "outputs", outputs, files, "output of the board")
    answers = final.references[0].outputs if final.references else {}
    expected = _save(folder, "expected", answers, files, "output of the reference")
    text = _print(trials)
    record.operators = text["operators"]
    if final.references:
        try:
            _make_bundle(final, final.references[0].source).save(folder / BUNDLE, key=signing_key)
            files[BUNDLE] = f"{'signed ' if signing_key else ''}bundle for `hil bundle run`"
        except UsageError as error:
            if signing_key is not None:
                raise
            trials.add_note(f"no bundle: {error.message}")
    script = _make_script(trials, final, inputs, expected)
    lines = [_explain_no_script(trials)]
    if script is not None and not trials.faults:
        write_file(folder / script.name, script.text)
        files[script.name] = "commands that reproduce the failure without hil"
        lines = _reproduce_failure(trials, final, script)
        record.stock = script.command
    write_file(folder / REPORT, write_report(record, final, text["text"], lines, files))
    trials.save()


def _save(folder: Path, kind: str, tensors: Mapping[str, Array], files: dict[str, str], what: str) -> list[str]:
    """Write tensors to a subdirectory. Return the files, relative to ``folder``, and describe them in ``files``."""
    named = {
        f"{number}-{make_safe_name(name)}.npy": (name, array) for number, (name, array) in enumerate(tensors.items())
    }
    with convert_write_errors(folder / kind):
        save_files(folder / kind, named)
    paths = {f"{kind}/{file}": name for file, (name, _) in named.items()}
    files.update({path: f"{what} {name}" for path, name in paths.items()})
    return list(paths)


def _add_references(trials: Trials, case: Case) -> Case:
    """Return the case with the reference's outputs. If the board's program crashed, hil has not computed them yet."""
    if case.references or case.model is None or case.inputs is None:
        return case
    asked = replace(case, outcome=None, error=None, result=None)
    return replace(case, references=Runner(trials.context).run_reference(asked).references)


def _print(trials: Trials) -> dict[str, Any]:
    assert trials.best is not None
    name = trials.best.model.name
    arguments = {"model": str((trials.folder / name).absolute())}
    log = trials.folder / "logs" / "report.log"
    show = print_mlir if name == MLIR_MODEL else print_model
    try:
        found: dict[str, Any] = trials.context.isolated.call(show, arguments, timeout=_PRINT_SECONDS, log=log)
    except IsolatedError as error:
        return {"text": f"not available: {error.message}", "operators": []}
    return found


def _make_bundle(case: Case, source: str) -> Bundle:
    """Return a bundle with the failing program. If the model cannot be compiled, bundle the model for ONNX Runtime.

    Raises:
        UsageError: the program cannot be bundled.
    """
    model, program = case.model, case.artifact
    assert model is not None and case.inputs is not None
    if program is None:
        if model.format != "onnx":
            raise UsageError(f"the {model.format} model cannot be compiled")
        program = _wrap_model(case)
    if program.carried:
        raise UsageError("the program has inputs that the model lacks")
    expected, options = case.references[0].outputs, case.options
    method = program.function or "main"
    signature = Signature(*(tuple(make_spec(*item) for item in side.items()) for side in (case.inputs, expected)))
    given = MethodTestCase(
        case.inputs,
        expected,
        rtol=options.rtol,
        atol=options.atol,
        name="failure",
        source=source,
        accept=options.accept,
    )
    made = {
        "model": {"name": model.path.name, "format": model.format, "digest": model.digest},
        "tools": {"hil": own_version(), "compiler": program.compiler},
    }
    return Bundle.create(program, [MethodTestSuite(method, [given])], signatures={method: signature}, made=made)


def _wrap_model(case: Case) -> Artifact:
    model = case.model
    assert model is not None
    main = next(name for name, path in model.files.items() if path == model.path)
    return make_program("onnxruntime", model.files, main, function=model.function, compiler="none")


def _make_script(trials: Trials, case: Case, inputs: Sequence[str], expected: Sequence[str]) -> StockScript | None:
    """Return a script that reproduces the failure without hil, or None if the runtime has no such commands."""
    runtime, config, options = trials.record.runtime, trials.choice.config, case.options
    is_slow = trials.record.slow is not None
    if runtime == "onnxruntime":
        return (
            make_onnxruntime_timing(inputs)
            if is_slow
            else make_onnxruntime_script(inputs, expected, options.rtol, options.atol)
        )
    if runtime != "iree" or case.outcome is None or case.model is None or options.compiler not in ("", "iree"):
        return None
    asked = combine_flags(config.compile_flags.get("iree", ()), options.compile_flags)
    flags = case.artifact.flags if case.artifact is not None else choose_settings(case.model, asked).flags
    device = config.devices.get("iree", "")
    source = IreeSource(case.model.path.name, case.model.function)
    if is_slow:
        return make_iree_timing(source, flags, device, inputs)
    return make_iree_script(case.outcome, source, flags, device, inputs, expected, options.rtol, options.atol)


def _explain_no_script(trials: Trials) -> str:
    if trials.faults:
        faults = " ".join(f"`--fault {fault}`" for fault in trials.faults)
        return f"The failure is a fault of hil's simulator ({faults}): tools other than hil cannot reproduce it."
    return f"hil knows no other tool that runs programs for {trials.record.runtime}: use `hil bundle run {BUNDLE}`."


def _reproduce_failure(trials: Trials, case: Case, script: StockScript) -> list[str]:
    """Run a script if the failure can occur on this machine. Return the report's lines about the reproduction."""
    is_slow = trials.record.slow is not None
    lines = [f"`{script.command}` {'measures the time' if is_slow else 'reproduces the failure'} without hil:", ""]
    lines += [f"    {line}" for line in script.text.strip().splitlines()]
    is_local = case.outcome in COMPILING or trials.choice.config.simulator is not None
    if not is_local and is_slow:
        return [*lines, "", f"Run it on {trials.record.board}."]
    if not is_local:
        return [*lines, "", f"Run it on {trials.record.board}. Exit code 0 means that the failure does not occur."]
    limit = trials.options.timeout + _STOCK_SECONDS
    arguments = {"folder": str(trials.folder.absolute()), "command": script.command, "limit": limit}
    log = trials.folder / "logs" / "stock.log"
    try:
        done = trials.context.isolated.call(run_script, arguments, timeout=limit + _PRINT_SECONDS, log=log)
    except IsolatedError as error:
        return [*lines, "", f"hil could not run it on this machine: {error.message}"]
    code = done["code"]
    if is_slow:
        printed = [f"    {line[:300]}" for line in done["printed"].splitlines()]
        return [*lines, "", "On the machine that wrote this report:", "", *printed]
    if code == 0:
        trials.add_note("the failure does not occur without hil on this machine")
        return [*lines, "", "On the machine that wrote this report, the failure does **not** occur with these tools."]
    hangs = case.outcome is Outcome.TIMEOUT
    what = f"it was still running after {limit:g} s" if code is None else f"the exit code is {code}"
    if hangs != (code is None):
        trials.add_note("the tools without hil fail in a different way on this machine")
    printed = [f"    {line[:300]}" for line in done["printed"].splitlines()]
    return [*lines, "", f"On the machine that wrote this report, {what}:", "", *printed]
