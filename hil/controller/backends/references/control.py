"""Compute a model in the board's declared arithmetic on the host, to measure how far rounding moves the outputs.

The result is called the control. hil computes controls only for ONNX models. The model runs once without rounding, and
:data:`RUNS` times in the arithmetic: first rounded to nearest, then rounded randomly. If operators have
discontinuities, these runs are repeated with the decisions of the first run (:mod:`hil.compare.control`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.backends.references.own_code import own_code
from hil.controller.models.compiling import call_isolated
from hil.controller.models.inputs import digest_of_samples
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import convert_errors
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.core.files import read_file
from hil.core.installed import get_version
from hil.core.results import Control, Model
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import Array
from hil.errors import ReferenceFailed
from hil.formats.control_json import decode_control, encode_control

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hil.controller.models.compiling import Work

RUNS = 4
_FILE = "control.json"


def measure_control(
    model: Model, inputs: Mapping[str, Array], arithmetic: str, **work: Unpack[Work]
) -> dict[str, Control]:
    """Measure how far an arithmetic moves a model's outputs: output name -> control. Unaffected outputs have no entry.

    Raises:
        ReferenceFailed: hil has no control for this format, or cannot compute this model.
        StageTimeout: the computation timed out.
    """
    if model.format != "onnx":
        what = "a bundle created without --arithmetic" if model.format == "hilb" else f"a {model.format} model"
        raise ReferenceFailed(
            f"the board computes in {arithmetic}: hil cannot compute {what} in this arithmetic", stage="refer"
        )
    key = Cache.key(
        "control",
        source=describe_source(),
        model=model.digest,
        dims=dict(model.dims),
        arithmetic=arithmetic,
        inputs=digest_of_samples([inputs]),
        code=own_code(),
    )

    def make(folder: Path) -> None:
        with make_temporary_folder("hil-control-") as given:
            save_tensors(Path(given), inputs)
            arguments = {
                "model": str(model.path.absolute()),
                "inputs": str(given),
                "arithmetic": arithmetic,
                "output": str(folder / _FILE),
            }
            what = f"computing the model in {arithmetic}"
            with convert_errors("refer", what, ReferenceFailed, f"{what} failed", died=f"{what} died"):
                call_isolated(compute, arguments, work)

    meta = {"control": arithmetic, "model": model.name}
    entry, _ = work["cache"].get_or_make(key, meta, make, work["recompute"])
    document = json.loads(read_file(entry / _FILE))
    return {name: decode_control(one) for name, one in document.items()}


def describe_source() -> str:
    """Return the name and version of the evaluator."""
    return f"hil's node evaluator on onnxruntime {get_version('onnxruntime')}"


def compute(model: str, inputs: str, arithmetic: str, output: str) -> None:
    """Write the controls of a model's outputs. Runs in an isolated process."""
    from hil.controller.models.importers.onnx_data import load_with_data
    from hil.formats.onnx_functions import inline_functions

    loaded = load_with_data(Path(model))
    if loaded.functions:
        loaded = inline_functions(loaded)
    controls = run_controls(loaded, load_tensors(Path(inputs)), arithmetic)
    Path(output).write_text(json.dumps({name: encode_control(one) for name, one in controls.items()}))


def run_controls(model: Any, given: Mapping[str, Array], arithmetic: str) -> dict[str, Control]:
    """Evaluate an ``onnx.ModelProto`` with and without rounding, and measure how far the outputs move."""
    from hil.compare.control import measure_control
    from hil.controller.backends.references.runners.node_evaluator import Decisions, NodeEvaluator
    from hil.controller.backends.references.value_rounding import Exact, Names, Rounding

    evaluator, names, decisions = NodeEvaluator(model), Names.from_model(model), Decisions()
    exact = evaluator.run(given, Exact(), decisions)
    clipped: set[str] = set()

    def run_rounded(*, held: bool) -> list[dict[str, Array]]:
        runs = []
        for seed in (None, *range(1, RUNS)):
            rounding = Rounding(arithmetic, names, seed=seed)
            runs.append(evaluator.run(given, rounding, decisions.replay() if held else None))
            clipped.update(rounding.clipped)
        return runs

    free = run_rounded(held=False)
    held = run_rounded(held=True) if decisions else free
    found = {
        name: measure_control(
            arithmetic, describe_source(), array, [run[name] for run in held], [run[name] for run in free]
        )
        for name, array in exact.items()
    }
    weights = tuple(sorted(clipped))
    return {name: replace(control, clipped=weights) for name, control in found.items() if control is not None}
