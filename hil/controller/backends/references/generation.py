"""Compute the reference and the control of a generation.

The reference is the model in float64, the control is the model in the hardware's arithmetic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hil.controller.backends.references.own_code import own_code
from hil.controller.models.compiling import call_isolated
from hil.controller.models.inputs import digest_of_samples
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import convert_errors
from hil.controller.storage.sources.own_code import digest_code
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.core.installed import get_version
from hil.core.results import Model, RunResult
from hil.core.scratch import make_temporary_folder
from hil.core.steps import StepsPlan
from hil.core.tensors import Array
from hil.errors import ReferenceFailed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hil.controller.models.compiling import Work

EXACT = "float64"


def run_generation(
    model: Model, inputs: Mapping[str, Array], plan: StepsPlan, arithmetic: str = EXACT, **work: Unpack[Work]
) -> RunResult:
    """Generate tokens with a model on the host. Results are cached by model, inputs, plan and version.

    Args:
        inputs: Inputs of the stepped program, with all tokens as forced tokens.
        arithmetic: ``float64`` for the reference, or the arithmetic of the control.

    Raises:
        ReferenceFailed: The model is not an ONNX model, or cannot be evaluated.
        StageTimeout: The computation timed out.
    """
    if model.format != "onnx":
        raise ReferenceFailed(
            f"no independent reference can generate tokens with {model.format} models",
            stage="refer",
            hint="name an ONNX export of the model in the specification: reference = 'model.onnx'",
        )
    library = "onnx" if arithmetic == EXACT else "onnxruntime"
    source = (
        f"{'onnx reference evaluator' if arithmetic == EXACT else 'onnxruntime'} {get_version(library)}, {arithmetic}"
    )
    key = Cache.key(
        "generation",
        source=source,
        model=model.digest,
        dims=dict(model.dims),
        inputs=digest_of_samples([inputs]),
        plan=plan.to_json(),
        code=[own_code(), digest_code("core/steps.py", "core/stepped_program.py")],
    )

    def make(folder: Path) -> None:
        from hil.controller.backends.references.runners.decoder import run_decoder

        with make_temporary_folder("hil-generation-") as given:
            save_tensors(Path(given), inputs)
            arguments = {
                "model": str(model.path.absolute()),
                "inputs": str(given),
                "plan": json.dumps(plan.to_json()),
                "arithmetic": arithmetic,
                "output": str(folder),
            }
            what = f"generating tokens in {arithmetic}"
            with convert_errors("refer", what, ReferenceFailed, f"{what} failed", died=f"{what} died"):
                call_isolated(run_decoder, arguments, work)

    entry, cached = work["cache"].get_or_make(key, {"reference": source, "model": model.name}, make, work["recompute"])
    provenance = {"reference": "onnx-reference" if arithmetic == EXACT else "onnxruntime", "version": source}
    return RunResult(source, load_tensors(entry), provenance={**provenance, "cached": cached})
