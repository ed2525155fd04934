"""Convert a finished case to the record for reports."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hil.compare.comparison import OutputComparison
from hil.controller.models.flows.flow import Flow
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.records.case_fields import make_case_fields
from hil.controller.pipeline.records.record import record_case, record_verdict
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.screen.texts import shorten
from hil.controller.workloads.suites.cases.spec import CaseSpec
from hil.controller.workloads.suites.request import SuiteRequest
from hil.controller.workloads.suites.store import SuiteDirectory
from hil.controller.workloads.suites.tasks import Task, summarize_confirmations
from hil.core.results import Outcome

_DETAIL = 8 << 10  # characters


# `hil run` option in a hint -> equivalent text for a suite's model.
_INSTEAD = {
    "--function": "suites require models with one function; for others, create a bundle: hil bundle create MODEL",
    "--expected": "put the expected outputs in NAME.expected.npz next to the model",
    "--input": "put the input in NAME.inputs.npz next to the model",
}


def record_of(
    spec: CaseSpec, task: Task, suite: str, flow: Flow, request: SuiteRequest, run: SuiteDirectory
) -> CaseRecord:
    """Return the record of a finished case. Store the tensors if needed.

    Args:
        run: stores the tensors for cases that did not pass, or for all cases if the request asks for tensors.
    """
    case, own = task.answered, spec.flow or flow
    # The command selects the flow, so it must also select the runtime of a model that replaced the flow's.
    has_runtimes = any("runtime" in values for values in request.settings.per_model.values())
    is_replaced = own.name != request.flow and (request.yields_flow or has_runtimes)
    asked = replace(request, runtime=own.runtime) if is_replaced else request
    ended = case.outcome or Outcome.RUN_ERROR
    kept = _store_tensors(case, run, ended is not Outcome.PASS or request.keep_all)
    artifact, plain = case.artifact, case.plain_verdict
    told = make_case_fields(record_case(case, {}))
    option = case.error.option if case.error is not None else ""
    told |= {"hint": _INSTEAD.get(option, told["hint"]), "detail": shorten(told["detail"], _DETAIL)}
    return CaseRecord(
        **told,
        id=spec.id,
        model=spec.model,
        suite=suite,
        flow=own.name,
        runtime=own.runtime,
        outcome=ended.value,
        ended=ended.value,
        layer=spec.layer,
        op=spec.op,
        params=dict(spec.params),
        board=task.wrong_on or task.board,
        hw_type=task.hw_type,
        program=artifact.digests[artifact.main] if artifact else "",
        plain_outputs=[] if plain is None else record_verdict(plain).outputs,
        plain_against="" if plain is None else plain.against,
        attempts=list(task.attempts),
        confirmed=summarize_confirmations(task.wrong_on, task.confirmations),
        repeat=asked.command(spec.id),
        diff=_build_diff_command(case, kept),
        folder=f"cases/{spec.id}" if run.get_case_folder(spec.id).exists() else "",
        directories=list_directories(case, run),
        started=task.started,
        content=spec.content,
    )


def list_directories(case: Case, run: SuiteDirectory) -> dict[str, str]:
    """Return the directories that the case wrote outside its own directory, by kind."""
    folders = {f"{one.kind} profile": Path(one.folder) for one in case.profiles}
    if (ir := case.options.debug_ir) is not None and ir.is_dir() and any(ir.iterdir()):
        folders = {"ir": ir, **folders}
    return {what: run.to(folder) for what, folder in folders.items()}


def _store_tensors(case: Case, run: SuiteDirectory, wanted: bool) -> dict[str, dict[str, Path]]:
    """Store a case's tensors. Return the files by kind and tensor name, in order."""
    if not wanted:
        return {}
    held = {
        "inputs": case.inputs,
        "outputs": case.result.outputs if case.result else None,
        **{_name_reference_folder(number): one.outputs for number, one in enumerate(case.references)},
        "plain_references": case.plain_reference.outputs if case.plain_reference else None,
    }
    return {
        kind: dict(zip(tensors, run.save_tensors(case.name, kind, tensors), strict=True))
        for kind, tensors in held.items()
        if tensors
    }


def _name_reference_folder(number: int) -> str:
    """Return the directory name for the outputs of the reference with this index."""
    return f"references-{number}" if number else "references"


def _build_diff_command(case: Case, kept: Mapping[str, Mapping[str, Path]]) -> str:
    """Return the command that shows the differences of the worst output."""
    # Generations do not get such a command: logits have a row per position and call, and the reference's calls may
    # differ.
    if case.outcome is not Outcome.FAIL or not case.verdicts or not kept.get("outputs") or case.generation:
        return ""
    beside = [(verdict, _name_reference_folder(number)) for number, verdict in enumerate(case.verdicts)]
    beside += [(case.plain_verdict, "plain_references")] if case.plain_verdict is not None else []
    verdict, kind = next((one for one in beside if not one[0]), beside[-1])
    if not verdict.outputs or not kept.get(kind):
        return ""
    # Comparisons are in output order, but have the references' names, which may have a different order.
    output, worst = max(
        zip(kept["outputs"].values(), verdict.outputs, strict=True), key=lambda pair: _rank_output(pair[1])
    )
    words = ["hil", "compare", str(output), str(kept[kind][worst.name])]
    if (tolerance := worst.tolerance) is not None:
        words += ["--rtol", f"{tolerance.rtol:g}", "--atol", f"{tolerance.atol:g}"]
    return shlex.join([*words, "--plot", "diff.png"])


def _rank_output(output: OutputComparison) -> tuple[bool, float]:
    return not output.passed, output.max_abs if output.max_abs is not None else float("inf")
