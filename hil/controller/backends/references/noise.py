"""How far rounding alone moves a reference's outputs: its own noise.

Nobody can judge an answer more finely than the reference was computed. Where a sum cancels, what is left of it is
rounding error, however small or large the output is. So the reference runs again on inputs that differ by one unit of
their dtype's eps, which no float computation can tell from the given ones; what its outputs move by is their noise
(D. S. Parker, Monte Carlo Arithmetic, 1997, perturbs operands the same way). It needs nothing but the reference itself,
so that every format has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple

import numpy as np

from hil.compare.tolerance import DEFAULT_TOLERANCES, blindness, fitted
from hil.compare.values import EXACT_DTYPES
from hil.core.results import Noise
from hil.core.tensors import Array, dtype_name, float_limits

# A single run may round to the very same values by chance; the largest of four seldom does.
RUNS = 4


def perturbed(inputs: Mapping[str, Array], seed: int) -> dict[str, Array]:
    """The inputs with every float moved up or down by one unit of its dtype's eps, by chance.

    Zeros, integers and floats of 8 bits or less (their steps are no rounding noise) stay as they are.
    """
    rng = np.random.default_rng(seed)
    moved: dict[str, Array] = {}
    for name, array in inputs.items():
        dtype = dtype_name(array.dtype)
        moved[name] = array
        if dtype not in EXACT_DTYPES and array.dtype.itemsize >= 2 and array.size:
            eps = float(float_limits(array.dtype).eps)
            wide = np.result_type(array.dtype, np.float64) if array.dtype.kind in "fc" else np.dtype(np.float64)
            factors = 1 + eps * rng.choice((-1.0, 1.0), array.shape)
            with np.errstate(all="ignore"):  # infinities and NaN stay
                other = (array.astype(wide) * factors).astype(array.dtype)
            if other.tobytes() != array.tobytes():
                moved[name] = other
    return moved


def noise_between(outputs: Mapping[str, Array], runs: list[Mapping[str, Array]]) -> dict[str, Noise]:
    """The noise of every float output, from what the same reference computed (``runs``) on inputs that were moved.

    An output whose shape depends on its inputs' values has none.
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
