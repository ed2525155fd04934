"""Convert a case of run.json to the fields of a suite's case record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET

from hil.controller.pipeline.records.next_steps import make_case_hint
from hil.controller.records.outputs import StoredVerdict
from hil.controller.records.run import DeviceStatistics, RunCase
from hil.controller.records.suite import OtherReference


def make_case_fields(case: RunCase) -> dict[str, Any]:
    """Return fields of :class:`hil.controller.records.suite.CaseRecord` for a case.

    The caller adds the other fields: the location of the case, the suite, and the command that repeats the case.
    """
    artifact, provenance, repetition = case.artifact, case.provenance, case.repetition
    device = case.device or DeviceStatistics(iterations=0)
    # Models that are programs, and programs of bundles, are not compiled.
    compiled = artifact and artifact.compiler != "none" and case.timings.compile_s is not None
    return {
        "stage": case.stage,
        "message": case.reason,
        "hint": make_case_hint(case),
        "detail": case.error.detail if case.error else "",
        "console": case.error.console if case.error else [],
        "timings": case.timings.to_json(),
        "device_p50_ns": device.p50_ns,
        "device_p90_ns": device.p90_ns,
        "samples_ns": device.warm_ns,
        "iterations": device.iterations,
        "cold": device.is_cold_only,
        "conditions": case.conditions,
        "grade": case.grade,
        "energy": case.energy,
        "generation": case.generation,
        "answers": repetition.text if repetition and repetition.iterations > 1 else "",
        "agentless": provenance.command.why if provenance and provenance.command else "",
        "artifact_bytes": artifact and artifact.bytes,
        "function": artifact.function if artifact else "",
        "compiler": artifact.compiler if artifact else "",
        "flags": artifact.flags if artifact else [],
        "cached": artifact.cached if artifact and compiled else None,
        "notes": artifact.notes if artifact else {},
        "placement": provenance.placement if provenance and provenance.placement is not UNSET else None,
        "elsewhere": (provenance and provenance.elsewhere) or "",
        **(_describe_verdict(case.verdicts[0]) if case.verdicts else {}),
        "decided_by": case.decided_by,
        "unanswered": case.unanswered,
        "other_references": [
            OtherReference(**_describe_verdict(one), outcome=one.outcome.value) for one in case.verdicts[1:]
        ],
        "disagreement": case.disagreement,
        "random": case.random,
    }


def _describe_verdict(verdict: StoredVerdict) -> Mapping[str, Any]:
    return {"against": verdict.against, "relation": verdict.relation.value, "outputs": verdict.outputs}
