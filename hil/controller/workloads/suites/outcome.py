"""A case's end as the record that reports are made of."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hil.compare.verdict import OutputComparison, Verdict
from hil.controller.models.flows import Flow
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.record import device_statistics, verdict_record
from hil.controller.storage.texts import shortened
from hil.controller.workloads.suites.request import Request
from hil.controller.workloads.suites.spec import CaseSpec
from hil.controller.workloads.suites.store import CaseRecord, SuiteRun
from hil.controller.workloads.suites.tasks import Task, confirmed
from hil.core.results import Outcome
from hil.core.text import jsonable

_DETAIL = 8 << 10  # characters


# Option of `hil run` -> what does the same for a model of a suite.
_INSTEAD = {
    "--function": "a suite runs models of one function; of several make a bundle: hil bundle create MODEL",
    "--expected": "say what it should give in NAME.expected.npz beside the model",
    "--input": "give it in NAME.inputs.npz beside the model",
    r"--runtime\b(?!-)": "choose another flow",
}


def record_of(spec: CaseSpec, task: Task, suite: str, flow: Flow, request: Request, run: SuiteRun) -> CaseRecord:
    """The record of a case that has ended; tensors worth keeping are stored.

    Args:
        run: where tensors go: those of a case that did not pass, or of all where the request says so.
    """
    case = task.case if task.wrong is None else task.wrong
    ended = case.outcome or Outcome.RUN_ERROR
    kept = _keep(case, run, ended is not Outcome.PASS or request.keep_all)
    artifact, error = case.artifact, case.error
    files = artifact.files.values() if artifact else ()
    statistics = device_statistics(case.result) if case.result else {}
    verdict = case.verdicts[0] if case.verdicts else None
    provenance = case.result.provenance if case.result else {}
    parts = provenance.get("placement")
    # Some models are programs, and some cases come with one.
    compiled = artifact is not None and artifact.compiler != "none" and case.timings.compile_s is not None
    return CaseRecord(
        id=spec.id,
        model=spec.model,
        suite=suite,
        flow=flow.name,
        runtime=flow.runtime,
        outcome=ended.value,
        ended=ended.value,
        layer=spec.layer,
        op=spec.op,
        params=spec.params,
        board=task.wrong_on or task.board,
        hw_type=task.hw_type,
        stage=case.stage,
        message=case.reason,
        hint=_hint(error.hint) if error else "",
        detail=shortened(error.detail, _DETAIL) if error else "",
        timings=asdict(case.timings),
        device_p50_ns=statistics.get("p50_ns"),
        device_p90_ns=statistics.get("p90_ns"),
        iterations=statistics.get("iterations", 0),
        cold=statistics.get("iterations") == 1 and statistics["cold_ns"] is not None,
        agentless=provenance.get("command", {}).get("why", ""),
        artifact_bytes=sum(path.stat().st_size for path in files if path.exists()) if artifact else None,
        program=artifact.digests[artifact.main] if artifact else "",
        cached=artifact.cached if artifact and compiled else None,
        notes=artifact.notes if artifact else {},
        placement=None if parts is None else tuple(parts),
        elsewhere=provenance.get("elsewhere", ""),
        outputs=_comparisons(verdict),
        against=verdict.against if verdict is not None else "",
        other_references=tuple(
            {"against": other.against, "outcome": other.outcome.value, "outputs": _comparisons(other)}
            for other in case.verdicts[1:]
        ),
        disagreement=case.disagreement,
        plain_outputs=_comparisons(case.plain_verdict),
        plain_against=case.plain_verdict.against if case.plain_verdict is not None else "",
        attempts=tuple(task.attempts),
        confirmed=confirmed(task.wrong_on, task.confirmations),
        repeat=request.command(spec.id),
        diff=_diff(case, kept),
        folder=f"cases/{spec.id}" if run.case_folder(spec.id).exists() else "",
        left=left_by(case, run),
        started=task.started,
        content=spec.content,
    )


def left_by(case: Case, run: SuiteRun) -> dict[str, str]:
    """Where else a case left something, by what it is."""
    folders = {f"{one['kind']} profile": Path(one["folder"]) for one in case.profiles}
    if (ir := case.options.debug_ir) is not None and ir.is_dir() and any(ir.iterdir()):
        folders = {"ir": ir, **folders}
    return {what: run.to(folder) for what, folder in folders.items()}


def _hint(hint: str) -> str:
    """What to do next, where that is said with an option of `hil run` that suites and tests have not."""
    return next((instead for option, instead in _INSTEAD.items() if re.search(option, hint)), hint)


def _comparisons(verdict: Verdict | None) -> tuple[Mapping[str, Any], ...]:
    return () if verdict is None else tuple(jsonable(verdict_record(verdict)["outputs"]))


def _keep(case: Case, run: SuiteRun, wanted: bool) -> dict[str, dict[str, Path]]:
    """Store what there is of a case's tensors; returns the files of each kind by the tensors' names, in order."""
    if not wanted:
        return {}
    held = {
        "inputs": case.inputs,
        "outputs": case.result.outputs if case.result else None,
        **{_reference_folder(number): one.outputs for number, one in enumerate(case.references)},
        "plain_references": case.plain_reference.outputs if case.plain_reference else None,
    }
    return {
        kind: dict(zip(tensors, run.save_tensors(case.name, kind, tensors), strict=True))
        for kind, tensors in held.items()
        if tensors
    }


def _reference_folder(number: int) -> str:
    """What the folder of a reference's answer is called, of several in the order in which they are asked."""
    return f"references-{number}" if number else "references"


def _diff(case: Case, kept: Mapping[str, Mapping[str, Path]]) -> str:
    """The command that shows where the worst output differs."""
    if case.outcome is not Outcome.FAIL or not case.verdicts or not kept.get("outputs"):
        return ""
    beside = [(verdict, _reference_folder(number)) for number, verdict in enumerate(case.verdicts)]
    beside += [(case.plain_verdict, "plain_references")] if case.plain_verdict is not None else []
    verdict, kind = next((one for one in beside if not one[0]), beside[-1])
    if not verdict.outputs or not kept.get(kind):
        return ""
    # Comparisons are in the order of the outputs, under the names of the references, which may be in another order.
    output, worst = max(zip(kept["outputs"].values(), verdict.outputs, strict=True), key=lambda pair: _badness(pair[1]))
    words = ["hil", "compare", str(output), str(kept[kind][worst.name])]
    if (tolerance := worst.tolerance) is not None:
        words += ["--rtol", f"{tolerance.rtol:g}", "--atol", f"{tolerance.atol:g}"]
    return shlex.join([*words, "--plot", "diff.png"])


def _badness(output: OutputComparison) -> tuple[bool, float]:
    return not output.passed, output.max_abs if output.max_abs is not None else float("inf")
