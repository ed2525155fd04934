"""What a quantiser looks at to learn the ranges of a model's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hil.controller.models.inputs import make_inputs
from hil.controller.storage.paths import exists
from hil.controller.storage.tensor_files import load_npz
from hil.core.digest import digest_of
from hil.core.results import Model
from hil.core.tensors import Array, dtype_name, to_bytes
from hil.errors import UsageError


def calibration_samples(model: Model, given: Sequence[Mapping[str, Array]], count: int) -> list[dict[str, Array]]:
    """The samples to calibrate with, each every input by name.

    Args:
        model: an imported model whose inputs are known.
        given: the caller's; empty takes the file beside the model, or else random ones.
        count: how many random ones.

    Raises:
        UsageError: the model does not take them, or the file is not as it must be.
    """
    specs = model.inputs or ()
    file = model.path.with_name(f"{model.path.stem}.calibration.npz")
    from_file = not given and exists(file)
    if from_file:
        given = _read(file)
    # The tests' own random inputs have seed 0 unless somebody asks for another: no model is calibrated on those.
    seeds = range(1, 1 + (len(given) or count))
    samples = [dict(one) for one in given] or [{} for _ in seeds]
    try:
        return [
            make_inputs(specs, sample, seed=seed, ranges=model.ranges, dims=model.dims)
            for seed, sample in zip(seeds, samples, strict=True)
        ]
    except UsageError as error:
        where = f"{file}: " if from_file else "calibration data: " if given else ""
        raise UsageError(f"{where}{error.message}", hint=error.hint) from error


def digest_of_samples(samples: Sequence[Mapping[str, Array]]) -> str:
    """One digest for all samples: names, dtypes, shapes, values, order."""
    told = [
        f"{name}\0{dtype_name(array.dtype)}\0{array.shape}\0{digest_of(to_bytes(array))}"
        for sample in samples
        for name, array in sample.items()
    ]
    return digest_of("\n".join([str(len(samples)), *told]).encode())


def _read(file: Path) -> list[dict[str, Array]]:
    arrays = load_npz(file)
    counts = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if not counts or min(counts.values()) < 1 or len(set(counts.values())) > 1:
        held = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "nothing"
        raise UsageError(
            f"{file} must hold an array for each input, all with the same number of samples in front; it holds {held}",
            hint="numpy.savez(FILE, image=images), where images[0] is what the model takes as image",
        )
    return [{name: array[index] for name, array in arrays.items()} for index in range(next(iter(counts.values())))]
