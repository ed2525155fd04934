"""Use expected outputs from the user instead of a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.models.inputs import as_array, parse_input
from hil.core.results import RunResult
from hil.core.tensors import Array, TensorSpec
from hil.errors import UsageError, did_you_mean

# Texts with which iree-run-module excludes an output from the comparison.
_IGNORED = ("(ignored)", "(null)")
# Maximum number of outputs, if the model's outputs are unknown and files are assigned in order.
_MANY = 1000


def read_expected(given: Sequence[str | Path] | Mapping[str, Array], outputs: Sequence[TensorSpec] | None) -> RunResult:
    """Return expected outputs as a result for the comparison.

    Args:
        given: Name -> tensor, or texts in the form of ``--input`` (``y.npy``, ``NAME=y.npy``, ``all.npz``,
            ``NAME=y.pb``, ``4xf32=1 2 3 4``). Texts are assigned by output name, or in order.
        outputs: The model's outputs, or None if only the board knows them. They are then named output0, output1, ...

    Returns:
        The given outputs, in the model's order. Dtype and shape are not checked: the comparison reports a mismatch as a
        result, not as invalid usage. ``provenance["ignored"]`` contains the positions of ignored outputs
        (``(ignored)``).

    Raises:
        UsageError: a file cannot be read, or names an unknown output.
    """
    specs = list(outputs) if outputs is not None else [TensorSpec(f"output{i}", "", ()) for i in range(_MANY)]
    found: dict[str, Array] = {}
    if isinstance(given, Mapping):
        named = {spec.name: spec for spec in specs}
        for name, value in given.items():
            if outputs is not None and name not in named:
                hint = f"{did_you_mean(name, named)}outputs of the model: {', '.join(map(str, specs))}"
                raise UsageError(f"unknown output {name!r}", hint=hint)
            found[name] = as_array(f"expected output {name!r}", value, named.get(name))
        return RunResult("expected", _sort_outputs(found, specs), provenance={"expected": ["given as arrays"]})
    texts = [str(item) for item in given]
    ignored: list[str] = []
    for text in texts:
        open_ = [spec for spec in specs if spec.name not in (*found, *ignored)]
        if text in _IGNORED and open_:
            ignored.append(open_[0].name)
        else:
            found |= parse_input(text, open_)
    provenance: dict[str, Any] = {"expected": texts}
    if ignored:
        provenance["ignored"] = [place for place, spec in enumerate(specs) if spec.name in ignored]
    return RunResult(f"expected ({', '.join(texts)})", _sort_outputs(found, specs), provenance=provenance)


def _sort_outputs(found: Mapping[str, Array], specs: Sequence[TensorSpec]) -> dict[str, Array]:
    known = [spec.name for spec in specs if spec.name in found]
    return {name: found[name] for name in dict.fromkeys([*known, *found])}
