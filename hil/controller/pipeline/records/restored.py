"""Restore a case from a stored run, to run its program again."""

from __future__ import annotations

from pathlib import Path

from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.model_settings import for_model
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.run import RunCase, StoredSpec
from hil.controller.storage.runs import Run
from hil.core.results import Artifact, RunResult
from hil.core.tensors import TensorSpec


def restore_spec(spec: StoredSpec) -> TensorSpec:
    """Return a stored input or output specification."""
    return TensorSpec(spec.name, spec.dtype, tuple(spec.shape))


def restore_case(run: Run, case: RunCase, job: Job, artifact: Artifact) -> Case:
    """Return a stored case for a new run: same inputs, references and options, with the given program."""
    references = tuple(
        RunResult(one.source, run.load_tensors(one.outputs), provenance=one.provenance, relation=one.relation)
        for one in case.references
    )
    path = next((path for path in job.models if str(path) == case.path), Path(case.path))
    return Case(
        case.name,
        path,
        for_model(job.options(), path),
        Path(),
        artifact=artifact,
        inputs=run.load_tensors(case.inputs),
        references=references,
    )
