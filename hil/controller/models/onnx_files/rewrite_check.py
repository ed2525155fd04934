"""Check that rewrites preserve the outputs of an ONNX model.

Runs the model in ONNX Runtime before and after each rewrite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hil.controller.models.compiling import Work, call_isolated
from hil.controller.models.inputs import digest_of_samples
from hil.controller.models.onnx_files.onnx_contrib import remove_accuracy_levels
from hil.controller.models.onnx_files.onnx_rewrites import INLINER, iter_rewrites
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import convert_errors
from hil.controller.storage.sources.own_code import ONNX_REWRITING, digest_code
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.core.installed import get_version
from hil.core.results import Model
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import Array, get_dtype_name, get_float_limits
from hil.errors import ImportFailed

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Tolerance: both models run on the same kernels without optimizations, so only rounding may differ.
_EPSILONS = 16
_HINT = (
    "hil changed the model incorrectly before compilation: export it with opset 17 or newer, without local functions"
)


def is_rewritten(model: Model, makers: Iterable[str]) -> bool:
    """Return True if one of these compilers or references receives the model with the rewrites for IREE's importer."""
    return model.format == "onnx" and any(maker.startswith("iree") for maker in makers)


def check_rewrites(
    model: Model, inputs: Mapping[str, Array], *, is_converted: bool = True, **work: Unpack[Work]
) -> None:
    """Check that the model for IREE's importer and the original model return the same outputs for a case's inputs.

    Does nothing for models without rewrites, for models with random numbers, and for models that ONNX Runtime cannot
    run.

    Args:
        model: the original model.
        inputs: case inputs.
        is_converted: True if the opset is also converted; otherwise only local functions are inlined.
        work: execution settings.

    Raises:
        ImportFailed: a rewrite changed an output; the message names the rewrite and the output.
        StageTimeout: the check took too long.
    """
    names = [name for name in model.producer.get("rewrites", ()) if is_converted or name == INLINER]
    if not names or model.producer.get("random"):
        return
    key = Cache.key(
        "rewrites",
        model=model.digest,
        dims=dict(model.dims),
        inputs=digest_of_samples([inputs]),
        names=names,
        tools=[get_version("onnx"), get_version("onnxruntime")],
        code=digest_code(*ONNX_REWRITING, "controller/models/onnx_files/rewrite_check.py"),
    )

    def ask() -> dict[str, str]:
        with make_temporary_folder("hil-rewrites-") as folder:
            save_tensors(Path(folder), inputs)
            arguments = {"path": str(model.path.absolute()), "dims": dict(model.dims), "inputs": folder, "names": names}
            what = f"checking the rewrites of {model.path.name}"
            with convert_errors("import", what, ImportFailed, f"{what} failed"):
                return {"change": call_isolated(find_change, arguments, work)}

    found, _ = work["cache"].get_or_compute(key, {"model": model.name, "rewrites": ", ".join(names)}, ask)
    if found["change"]:
        raise ImportFailed(found["change"], stage="import", hint=_HINT)


def find_change(path: str, dims: Mapping[str, int], inputs: str, names: Sequence[str]) -> str:
    """Return a text about the first rewrite in ``names`` that changes an output, or "". Runs in an isolated process."""
    from hil.controller.models.onnx_files.onnx_model import load_model

    file, given = Path(path), load_tensors(Path(inputs))
    original = load_model(file, dims)
    remove_accuracy_levels(original)
    if (before := run_plainly(original.SerializeToString(), file.parent, given)) is None:
        return ""
    for name, model in iter_rewrites(original):
        if name not in names:
            break
        if (after := run_plainly(model.SerializeToString(), file.parent, given)) is None:
            return ""
        if change := find_difference(before, after):
            return f"{name} changed {change}"
    return ""


def find_difference(before: Mapping[str, Array], after: Mapping[str, Array], epsilons: float = _EPSILONS) -> str:
    """Return the first difference between the outputs of two models, or "".

    Args:
        before, after: outputs before and after the rewrite.
        epsilons: tolerance for floats, in eps of the dtype times the largest value of the output.
    """
    for (name, old), new in zip(before.items(), after.values(), strict=True):
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            return (
                f"output {name}: {get_dtype_name(new.dtype)} {new.shape}, was {get_dtype_name(old.dtype)} {old.shape}"
            )
        wrong = ~_are_equal(old, new, epsilons)
        if wrong.any():
            first = tuple(int(place) for place in np.argwhere(wrong)[0])
            count = f"{np.count_nonzero(wrong):,} of {old.size:,} values differ"
            return f"output {name}: {count}, at {list(first)} {new[first]}, was {old[first]}"
    return ""


def _are_equal(old: Array, new: Array, epsilons: float) -> Array:
    if "float" not in get_dtype_name(old.dtype):
        return np.asarray(old == new)
    one, other = old.astype(np.float64), new.astype(np.float64)
    scale = np.max(np.abs(one), where=np.isfinite(one), initial=0.0)
    with np.errstate(invalid="ignore"):
        close = np.abs(one - other) <= epsilons * float(get_float_limits(old.dtype).eps) * scale
    return np.asarray(close | (one == other) | (np.isnan(one) & np.isnan(other)))


def run_plainly(model: str | bytes, folder: Path, given: Mapping[str, Array]) -> dict[str, Array] | None:
    """Run a model in ONNX Runtime without optimizations. Return None if ONNX Runtime cannot run it.

    Args:
        model: path, or serialized model with external data in ``folder``.
        folder: external data directory.
        given: inputs by name.
    """
    import onnxruntime as ort

    from hil.formats.ort_values import copy_from_ort, make_plain_options, parse_type, to_ort

    options = make_plain_options()
    if isinstance(model, bytes):
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        values = session.run_with_ort_values(None, {name: to_ort(array) for name, array in given.items()})
        kinds: list[Any] = [parse_type(node.type) for node in session.get_outputs()]
        if None in kinds:
            return None
    except Exception as error:  # raised by ONNX Runtime, or UsageError for an unsupported dtype
        print(f"note: not checked: {error}", flush=True)
        return None
    return {
        node.name: copy_from_ort(value, kind)
        for node, value, kind in zip(session.get_outputs(), values, kinds, strict=True)
    }
