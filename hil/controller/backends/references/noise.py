"""How far rounding alone moves a reference's outputs: its own noise.

Nobody can judge an answer more finely than the reference was computed. Where a sum cancels, what is left of it is
rounding error, however small or large the output is. So the reference runs again on inputs that differ by one unit of
their dtype's eps, which no float computation can tell from the given ones; what its outputs move by is their noise
(D. S. Parker, Monte Carlo Arithmetic, 1997, perturbs operands the same way). It needs nothing but the reference itself,
so that every format has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np

from hil.compare.tolerance import DEFAULT_TOLERANCES, blindness, fitted
from hil.compare.values import EXACT_DTYPES
from hil.controller.backends.references import default_references, refer, refer_with_fallback, references
from hil.core.digest import digest_file
from hil.core.results import Model, Noise, RunResult
from hil.core.scratch import temporary_folder
from hil.core.tensors import Array, dtype_name
from hil.errors import StageError, UsageError

# A single run may round to the very same values by chance; the largest of four seldom does.
RUNS = 4
# What one protobuf message holds, and some room.
_MOST_BYTES = 1 << 30


def measure_noise(model: Model, inputs: Mapping[str, Array], result: RunResult, **settings: Any) -> dict[str, Noise]:
    """Measure the noise of a reference's outputs.

    Args:
        model: what the reference computed.
        inputs: every input by name.
        result: what the reference made of them. Where no reference of hil's made it (it was given, as what is
            expected), the model's default one is asked in its place.
        settings: as :func:`hil.controller.backends.references.refer` takes them.

    Returns:
        Output name -> its noise. Empty where no input is a float that can be moved (nor, of an ONNX model, a weight),
        or the reference cannot run.
    """
    moved = [perturbed(inputs, seed) for seed in range(RUNS)]
    moved = [one for one in moved if any(one[name] is not array for name, array in inputs.items())]
    name = result.provenance.get("reference")
    try:
        if name not in references():
            if not default_references(model):
                return {}
            result = refer_with_fallback(model, inputs, **settings)
            name = result.provenance["reference"]
        if moved:
            runs = [refer(name, model, one, **settings) for one in moved]
        else:
            with temporary_folder("hil-noise-") as folder:
                others = _of_moved_weights(model, Path(folder))
                runs = [refer(name, other, inputs, **settings) for other in others]
    except (StageError, UsageError):
        return {}
    return noise_between(result.outputs, [run.outputs for run in runs])


def _of_moved_weights(model: Model, folder: Path) -> Iterator[Model]:
    """An ONNX model with every float weight moved, a few times over: one of integers has nothing else to move."""
    if model.format != "onnx" or sum(file.stat().st_size for file in model.files.values()) > _MOST_BYTES:
        return
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(model.path)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
    for seed in range(RUNS):
        moved = {name: one for name, one in perturbed(weights, seed).items() if one is not weights[name]}
        if not moved:
            return
        for tensor in graph.graph.initializer:
            if tensor.name in moved:
                tensor.CopyFrom(numpy_helper.from_array(moved[tensor.name], tensor.name))
        path = folder / f"{seed}.onnx"
        onnx.save(graph, path)
        yield replace(model, path=path, files={path.name: path}, digest=digest_file(path))


def perturbed(inputs: Mapping[str, Array], seed: int) -> dict[str, Array]:
    """The inputs with every float moved up or down by one unit of its dtype's eps, by chance.

    Zeros, integers and floats of 8 bits or less (their steps are no rounding noise) stay as they are.
    """
    import ml_dtypes

    rng = np.random.default_rng(seed)
    moved: dict[str, Array] = {}
    for name, array in inputs.items():
        dtype = dtype_name(array.dtype)
        moved[name] = array
        if dtype not in EXACT_DTYPES and array.dtype.itemsize >= 2 and array.size:
            eps = float(ml_dtypes.finfo(array.dtype).eps)  # type: ignore[no-untyped-call]
            wide = np.result_type(array.dtype, np.float64) if array.dtype.kind in "fc" else np.dtype(np.float64)
            factors = 1 + eps * rng.choice((-1.0, 1.0), array.shape)
            with np.errstate(all="ignore"):  # infinities and NaN stay
                other = (array.astype(wide) * factors).astype(array.dtype)
            if other.tobytes() != array.tobytes():
                moved[name] = other
    return moved


def noise_between(outputs: Mapping[str, Array], runs: list[Mapping[str, Array]]) -> dict[str, Noise]:
    """The noise of every float output, from what the same reference computed on inputs that were moved.

    Args:
        outputs: on the inputs as given.
        runs: on moved ones. An output whose shape depends on its inputs' values has no noise there.
    """
    found: dict[str, Noise] = {}
    for name, array in outputs.items():
        dtype = dtype_name(array.dtype)
        others = [run[name] for run in runs if name in run and run[name].shape == array.shape]
        if dtype not in DEFAULT_TOLERANCES or not others:
            continue
        base = _wide(array)
        allowed = DEFAULT_TOLERANCES[dtype].rtol * np.abs(base)
        absolute = beyond = rms = 0.0
        with np.errstate(all="ignore"):
            for other in others:
                error = np.abs(_wide(other) - base)
                ok = np.isfinite(error)
                absolute = max(absolute, float(error.max(initial=0.0, where=ok)))
                beyond = max(beyond, float((error - allowed).max(initial=0.0, where=ok)))
                rms = max(rms, float(np.sqrt(np.mean(np.square(error, where=ok, out=np.zeros_like(error))))))
        found[name] = Noise(absolute, beyond, rms)
    return found


def largest_noise(measured: Sequence[Mapping[str, Noise]]) -> dict[str, Noise]:
    """Of each output the largest noise that any reference has."""
    found: dict[str, Noise] = {}
    for noise in measured:
        for name, one in noise.items():
            known = found.get(name, one)
            found[name] = Noise(*map(max, astuple(known), astuple(one)))
    return found


def telling_noise(outputs: Mapping[str, Array], noise: Mapping[str, Noise]) -> dict[str, Noise]:
    """The noise of those outputs whose verdict it may change: it widens the default tolerance, or that is blind."""
    found: dict[str, Noise] = {}
    for name, one in noise.items():
        dtypes = (dtype_name(outputs[name].dtype),) * 2
        plain, scale = fitted(dtypes, outputs[name], None, None)
        widened, _ = fitted(dtypes, outputs[name], None, None, one)
        if plain is not None and (plain != widened or blindness(plain, scale, given=False)):
            found[name] = one
    return found


def _wide(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
