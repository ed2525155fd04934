"""The model that was compiled beside the model it should be: the same layers, perhaps other weights."""

from __future__ import annotations

from collections.abc import Sequence

from hil.controller.analysis.layers import Layer
from hil.core.artifacts import Model
from hil.errors import UsageError

_HINT = "--artifact-model takes the same network as MODEL with other weights: the file that the compiler received"


def check_signatures(model: Model, other: Model) -> None:
    """Refuse a pair of models that do not take and return the same.

    Raises:
        UsageError: an input or output differs.
    """
    for kind, mine, theirs in (("inputs", model.inputs, other.inputs), ("outputs", model.outputs, other.outputs)):
        if mine != theirs:
            texts = [", ".join(map(str, specs or ())) or "unknown" for specs in (theirs, mine)]
            raise UsageError(
                f"{other.path.name} is not the same network as {model.path.name}: "
                f"its {kind} are {texts[0]}, they should be {texts[1]}",
                hint=_HINT,
            )


def check_layers(model: Model, layers: Sequence[Layer], other: Model, others: Sequence[Layer]) -> None:
    """Refuse a pair of models that do not consist of the same layers, in the same order, between the same tensors.

    Raises:
        UsageError: they differ; the message names the first place.
    """
    what = f"{other.path.name} is not the same network as {model.path.name}"
    for layer, twin in zip(layers, others, strict=False):
        if (layer.op, layer.nodes, layer.inputs, layer.outputs) != (twin.op, twin.nodes, twin.inputs, twin.outputs):
            raise UsageError(f"{what}: where it has {_text(twin)}, there should be {_text(layer)}", hint=_HINT)
    if len(layers) != len(others):
        raise UsageError(f"{what}: it has {len(others)} layers, not {len(layers)}", hint=_HINT)


def _text(layer: Layer) -> str:
    return f"{layer.name} ({', '.join(layer.inputs) or 'nothing'} to {', '.join(layer.outputs)})"
