"""Build the description of a model that all importers return."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hil.core.digest import digest_of
from hil.core.tensors import TensorSpec
from hil.errors import ImportFailed, UsageError, did_you_mean


def make_description(
    file: str,
    function: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec] | None,
    dims: Mapping[str, int] | None = None,
    *,
    ranges: Mapping[str, Sequence[float]] | None = None,
    external: Sequence[str] = (),
    needs: Mapping[str, Sequence[Any]] | None = None,
    producer: Mapping[str, Any] | None = None,
    random: Sequence[str] = (),
    float64: bool = True,
) -> dict[str, Any]:
    """Return the result of :class:`hil.controller.models.importers.Importer`. ``dims`` set symbolic dimensions.

    Args:
        file: file name for messages.
        function: entry point name.
        inputs, outputs: specs; outputs are None if unknown.
        dims: sizes for symbolic dimensions.
        ranges: input -> (low, high).
        external: further file names.
        needs: further file -> (required size in bytes, label for the data).
        producer: further data.
        random: labels of random nodes, if every output may depend on them.
        float64: whether the model may compute with float64.

    Raises:
        ImportFailed: the function has no outputs.
        UsageError: a dimension in ``dims`` does not exist.
    """
    if outputs is not None and not outputs:
        raise ImportFailed(
            f"function {function!r} of {file} has no outputs", hint="return at least one output for hil to check"
        )
    sizes = dims or {}
    check_dims(file, sizes, {dim for spec in inputs for dim in spec.shape if isinstance(dim, str)})
    drawn = [spec.name for spec in outputs or ()]
    return {
        "function": function,
        "inputs": [
            [spec.name, spec.dtype, [sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.shape]]
            for spec in inputs
        ],
        "outputs": outputs and [[spec.name, spec.dtype, list(spec.shape)] for spec in outputs],
        "ranges": dict(ranges or {}),
        "external": list(external),
        "needs": dict(needs or {}),
        "producer": dict(producer or {}) | ({"random": {"nodes": list(random), "outputs": drawn}} if random else {}),
        "float64": float64,
    }


def check_dims(file: str, dims: Mapping[str, int], symbols: Collection[str]) -> None:
    """Raise UsageError for sizes of dimensions that the model does not have."""
    if unknown := sorted(set(dims) - set(symbols)):
        have = ", ".join(sorted(symbols)) or "none (all dimensions are fixed)"
        raise UsageError(
            f"{file} has no dimension {unknown[0]!r}",
            hint=f"{did_you_mean(unknown[0], symbols)}symbolic dimensions: {have}",
        )


def digest_of_files(digests: Mapping[str, str]) -> str:
    """Return a digest for files by names and digests."""
    return digest_of("\n".join(f"{name}\0{digests[name]}" for name in sorted(digests)).encode())
