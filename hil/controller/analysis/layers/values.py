"""The values inside a model: every tensor that a CPU reference made on the way from inputs to outputs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.analysis.layers import compute
from hil.controller.analysis.layers.layer import Layer
from hil.controller.models.conversions import as_onnx
from hil.controller.models.random_inputs import random_tensor
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated, IsolatedCrash, IsolatedFailure, IsolatedTimeout
from hil.controller.storage.tensor_folder import INDEX, save_tensors
from hil.controller.storage.versions import version
from hil.core.artifacts import Model
from hil.core.digest import digest_of
from hil.core.tensors import Array, TensorSpec, dtype_name, load_npy, spec_of, to_bytes
from hil.errors import ReferenceFailed, StageTimeout, UsageError

MODES = ("real", "random")
# Who is asked, in this order.
_ORACLES = {"onnxruntime": "onnxruntime", "onnx-reference": "onnx"}
# Raise this when what is computed changes without the oracles' versions changing.
_VERSION = 2


class Activations(Mapping[str, Array]):
    """Tensor name -> what the reference computed, read from its file when it is asked for.

    The model's inputs and outputs are among them; constants, and values that are no tensors, are not.

    Attributes:
        source: who computed them, with version.
        outputs: names of the model's own outputs, in order.
        refused: those that were asked before and could not, as [name, reason].
    """

    def __init__(self, folder: Path) -> None:
        about = json.loads((folder / _ABOUT).read_text())
        self.source: str = about["source"]
        self.outputs = tuple(about["outputs"])
        self.refused: list[list[str]] = about["refused"]
        self._files: dict[str, tuple[Path, TensorSpec]] = {}
        for part in (folder / _INPUTS, folder / _VALUES):
            for item in json.loads((part / INDEX).read_text()):
                spec = TensorSpec(item["name"], item["dtype"], tuple(item["shape"]))
                self._files[spec.name] = (part / item["file"], spec)

    def __getitem__(self, name: str) -> Array:
        file, spec = self._files[name]
        return load_npy(file, spec.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def specs(self) -> Iterator[TensorSpec]:
        """Names, dtypes and shapes, without reading any values."""
        return (spec for _, spec in self._files.values())

    def spec(self, name: str) -> TensorSpec:
        """One tensor's dtype and shape, without reading its values."""
        return self._files[name][1]


_ABOUT, _INPUTS, _VALUES = "activations.json", "inputs", "values"


def activations(
    model: Model,
    inputs: Mapping[str, Array],
    *,
    cache: Cache,
    isolated: Isolated,
    recompute: bool,
    timeout: float | None,
    log: Path,
) -> Activations:
    """Every tensor that a CPU reference makes of a whole model, computed or from the cache.

    ONNX Runtime computes them with its optimisations off, so that no value is fused away; where it cannot, ONNX's own
    evaluator does.

    Args:
        model: an ONNX model, or one that :func:`hil.controller.models.conversions.as_onnx` makes into one.
        inputs: every input by name.
        cache: where the values are kept, by model, inputs and the references' versions.
        isolated: where they are computed.
        recompute: compute even though the cache has them.
        timeout: seconds for each reference, or None.
        log: what is printed meanwhile is appended here.

    Raises:
        UsageError: no ONNX model and none to be had.
        CompileFailed, CompileCrashed: it cannot be made into one.
        ReferenceFailed: no reference can run this model, or not with these inputs.
        StageTimeout: it took too long.
        StorageError: the values cannot be kept.
    """
    model = as_onnx(model, cache=cache, isolated=isolated, log=log)
    sources = {name: f"{name} {version(package)}" for name, package in _ORACLES.items()}
    key = Cache.key(
        "activations",
        sources=sources,
        model=model.digest,
        dims=dict(model.dims),
        inputs=digests_of(inputs),
        version=_VERSION,
    )

    def make(folder: Path) -> None:
        save_tensors(folder / _INPUTS, inputs)
        refused: list[list[str]] = []
        for name in _ORACLES:
            arguments = {
                "path": str(model.path.absolute()),
                "dims": dict(model.dims),
                "oracle": name,
                "inputs": str(folder / _INPUTS),
                "outputs": str(folder / _VALUES),
            }
            try:
                own = isolated.call(compute.run, arguments, timeout=timeout, log=log)
            except IsolatedTimeout as error:
                text = f"computing the values inside {model.path.name} {error.message}"
                raise StageTimeout(text, stage="refer", detail=error.detail) from error
            except (ReferenceFailed, IsolatedCrash, IsolatedFailure) as error:
                refused.append([name, error.message])
                continue
            about = {"source": sources[name], "outputs": own, "refused": refused}
            (folder / _ABOUT).write_text(json.dumps(about))
            return
        said = "; ".join(f"{name}: {reason}" for name, reason in refused)
        raise ReferenceFailed(
            f"no reference can compute the values inside {model.path.name} ({said})",
            stage="refer",
            hint="check the inputs' values, and whether `hil run` finds a reference for the whole model",
        )

    entry, _ = cache.get_or_make(key, {"model": model.name, "values": "all"}, make, recompute)
    return Activations(entry)


def layer_inputs(
    layer: Layer, activations: Mapping[str, Array], *, mode: str = "real", seed: int = 0
) -> dict[str, Array]:
    """What a layer is run on, by its model's input names, in order.

    Args:
        layer: of the model that the activations are of.
        activations: of :func:`activations`.
        mode: ``real`` is what the reference computed for the whole model; ``random`` the same dtype and shape with
            seeded values between the least and the greatest of those (bools and strings: any).
        seed: of the random ones.

    Raises:
        UsageError: no such mode.
        ReferenceFailed: the reference made no value for an input.
    """
    if mode not in MODES:
        raise UsageError(f"there is no mode {mode!r}", hint=f"one of {', '.join(MODES)}")
    values = _values(layer, layer.inputs, activations)
    if mode == "random":
        return {name: _like(name, value, seed) for name, value in values.items()}
    return values


def layer_outputs(layer: Layer, activations: Mapping[str, Array]) -> dict[str, Array]:
    """What the reference computed for a layer's outputs within the whole model, by name, in order.

    Raises:
        ReferenceFailed: it made no value for one.
    """
    return _values(layer, layer.outputs, activations)


def digests_of(tensors: Mapping[str, Array]) -> list[list[Any]]:
    """What tells tensors from others, for a cache's key."""
    return [
        [name, dtype_name(array.dtype), list(array.shape), digest_of(to_bytes(array))]
        for name, array in tensors.items()
    ]


def _values(layer: Layer, names: tuple[str, ...], activations: Mapping[str, Array]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for name in names:
        if name not in activations:
            raise ReferenceFailed(
                f"layer {layer.name}: the reference made no value for its tensor {name!r}",
                stage="refer",
                hint="these inputs do not reach it, or the values are of another model: compute them for this one",
            )
        found[name] = activations[name]
    return found


def _like(name: str, value: Array, seed: int) -> Array:
    """A random tensor with the dtype, the shape and the range of another."""
    spec = spec_of(name, value)
    bounds = _range(value)
    drawn = random_tensor(spec, value.shape, seed=seed, bounds=bounds)
    if bounds is None or value.dtype.kind == "c":
        return drawn
    # A float32 between two bounds may be rounded to just outside of them.
    low, high = (np.asarray(bound).astype(value.dtype) for bound in bounds)
    return np.asarray(np.clip(drawn, low, high), value.dtype)


def _range(value: Array) -> tuple[float, float] | None:
    """The least and the greatest finite value; None where there is none."""
    if value.dtype.kind in "bOU" or not value.size:
        return None
    if dtype_name(value.dtype).lstrip("u").startswith("int"):
        return int(value.min()), int(value.max())
    parts = value.astype(np.complex128 if value.dtype.kind == "c" else np.float64).ravel()
    numbers = parts.view(np.float64)
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    return None if math.isinf(low) or math.isinf(high) else (low, high)
