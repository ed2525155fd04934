"""Layers as files that anybody can use: the model, what it is run on, and what it should give."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hil.controller.analysis.layers import Layer
from hil.controller.analysis.layers.values import layer_inputs, layer_outputs
from hil.controller.storage.runs import storing
from hil.core.tensors import Array, save_npy


@dataclass(frozen=True)
class SavedLayer:
    """Where a layer was saved.

    Attributes:
        model: the ONNX file; large weights lie beside it, in a file of the same name and ``.data``.
        inputs, outputs: a .npy each, in the model's order.
    """

    model: Path
    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]

    @property
    def command(self) -> str:
        """What runs the layer on the simulator and compares it with what it should give."""
        parts = ["hil", "run", str(self.model), "--runtime-hw-type", "sim"]
        for option, files in (("--input", self.inputs), ("--expected", self.outputs)):
            parts += [part for file in files for part in (option, str(file))]
        return shlex.join(parts)


def save_layer(layer: Layer, activations: Mapping[str, Array], folder: Path) -> SavedLayer:
    """Copy a layer's model into a folder, and the values at its edges as .npy into a folder of the layer's name there.

    Args:
        layer: what to save.
        activations: what the reference computed for the whole model.
        folder: made if need be; files of the same names are written over.

    Raises:
        ReferenceFailed: the reference made no value for an input or an output.
        StorageError: the folder cannot be written.
    """
    sides = {"input": layer_inputs(layer, activations), "output": layer_outputs(layer, activations)}
    values = folder / layer.name
    files: dict[str, tuple[Path, ...]] = {}
    with storing(folder, "--save"):
        values.mkdir(parents=True, exist_ok=True)
        model = Path(shutil.copyfile(layer.path, folder / layer.path.name))
        if (data := layer.path.with_name(f"{layer.path.name}.data")).exists():
            shutil.copyfile(data, folder / data.name)
        for side, tensors in sides.items():
            files[side] = tuple(values / f"{side}_{number}.npy" for number in range(len(tensors)))
            for file, array in zip(files[side], tensors.values(), strict=True):
                save_npy(file, array)
    return SavedLayer(model, files["input"], files["output"])
