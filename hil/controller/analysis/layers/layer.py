"""One layer of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        name: ``<op>_<node name>``, unique in the model; letters, digits and ``._+-`` only.
        op: the operator, or those of a group in order: ``Conv+Relu``.
        nodes: names of the model's nodes that it is made of.
        path: the layer as an ONNX model of its own, constants in it.
        inputs, outputs: names of the tensors of the whole model that go in and come out, in the sub-model's order.
        depth: 0 for a layer that takes only the model's inputs, else one more than the deepest that it takes from.
        same_as: an earlier layer of the same full signature (operators, attributes, shapes, dtypes, quantisation); ""
            is the first of its kind. Its weights and what goes into it may be others.
        copy_of: an earlier layer of the same weights too, into which the same values go, whatever the model is run on;
            "" where there is none.
        by_chance: it draws random numbers (RandomNormal and its like, a Dropout of training), so no two runs agree.
    """

    name: str
    op: str
    nodes: tuple[str, ...]
    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    depth: int
    same_as: str = ""
    copy_of: str = ""
    by_chance: bool = False
