"""Element types as iree-run-module compares them: it tells integers with a sign from those without.

IREE's programs give integers without a sign (``i64``), but for those that they pass through untouched. A .npy file
always says one (``si64`` or ``ui64``): where they are expected from such a file, the tool calls equal integers
different.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hil.controller.pipeline.flagfile_tolerance import ATOLS
from hil.core.artifacts import Model
from hil.core.results import RunResult
from hil.core.tensors import Array, dtype_name, load_npy, read_as, to_bytes

_TYPED = re.compile(r"(?:\d+x)*([a-z]+\w*(?:<f\d+>)?)(?:=|$)")


def element_type(text: str) -> str:
    """The element type of a tensor in the tools' words: ``si64`` of ``2xsi64=1 2``; "" of what has none.

    Raises:
        UsageError: its .npy file cannot be read.
    """
    if text.startswith("@") and text.endswith(".npy"):
        dtype = load_npy(Path(text[1:]), mmap=True).dtype
        if dtype.kind in "bc":
            return "i1" if dtype.kind == "b" else f"complex<f{4 * dtype.itemsize}>"
        sign = {"i": "si", "u": "ui", "f": "f"}.get(dtype.kind)
        return f"{sign}{8 * dtype.itemsize}" if sign else ""
    typed = _TYPED.match(text)
    return typed[1] if typed else ""


def tool_differs(result: RunResult, reference: RunResult, wanted: Sequence[str], inputs: Mapping[str, Array]) -> str:
    """Why iree-run-module would call a program's outputs different though their values agree; "" where it would not.

    Args:
        result: what the program gave, as it is :func:`comparable`.
        reference: what is expected.
        wanted: of each output what :func:`element_type` says of the expected tensor; none are none that is looked at.
        inputs: what the program was given: an output that is equal to one may be that one, with the sign it came with.
    """
    ignored = reference.provenance.get("ignored", ())
    kinds = [kind for place, kind in enumerate(wanted) if place not in ignored]
    for (name, array), other, kind in zip(result.outputs.items(), reference.outputs.values(), kinds, strict=False):
        if array.dtype.kind not in "iub":
            if kind and dtype_name(array.dtype) not in ATOLS and to_bytes(array) != to_bytes(other):
                return (
                    f"output {name}: the values agree, but not the bits of a NaN or zero, as iree-run-module compares"
                )
            continue
        own = "i1" if array.dtype.kind == "b" else f"i{8 * array.dtype.itemsize}"
        signed = array.dtype.kind in "iu" and kind in (f"s{own}", f"u{own}")
        if kind not in ("", own) and not (signed and any(_same(array, one) for one in inputs.values())):
            return (
                f"output {name}: the values agree, but the elements expected are {kind} and the program's are {own}, "
                f"which iree-run-module calls different: write --expected_output=SHAPEx{own}=..."
            )
    return ""


def comparable(result: RunResult, reference: RunResult, model: Model | None) -> RunResult:
    """A run's outputs as they are compared with a reference's.

    Those that the reference says to ignore are left out. Where nothing tells whether a program's integers have a sign,
    they have that of the reference's.
    """
    ignored = reference.provenance.get("ignored", ())
    specs = (model and model.outputs) or ()
    kept = [(name, array, place) for place, (name, array) in enumerate(result.outputs.items()) if place not in ignored]
    outputs = {name: array for name, array, _ in kept}
    if len(specs) == len(result.outputs) and len(kept) == len(reference.outputs):
        pairs = zip(kept, reference.outputs.values(), strict=True)
        outputs = {name: read_as(array, dtype_name(other.dtype), specs[n]) for (name, array, n), other in pairs}
    return replace(result, outputs=outputs)


def _same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())
