"""Check that layers compute the same values as in the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hil.controller.analysis.layers.values import Activations, Layer, select_layer_inputs, select_layer_outputs
from hil.controller.models.compiling import Work, call_isolated
from hil.controller.models.onnx_files.rewrite_check import find_difference
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import convert_errors
from hil.core.files import digest_file
from hil.core.installed import get_version
from hil.errors import ImportFailed, ReferenceFailed

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Increase this when the check changes, to invalidate cached results.
_VERSION = 1


def find_changed_layers(layers: Sequence[Layer], computed: Activations, **work: Unpack[Work]) -> dict[str, str]:
    """Return layer -> difference, for layers whose results differ from the results in the whole model.

    Only layers with computed constants are run, in ONNX Runtime with their inputs in the model. Other layers are exact
    copies of parts of the model. Models with values from other references, and layers that ONNX Runtime cannot run, are
    not checked.
    """
    folded = [layer for layer in layers if layer.folded and not layer.by_chance]
    if not folded or not computed.source.startswith("onnxruntime"):
        return {}
    key = Cache.key(
        "changed-layers",
        layers=[digest_file(layer.path) for layer in folded],
        values=computed.folder.name,
        tools=[get_version("onnxruntime")],
        version=_VERSION,
    )

    def ask() -> dict[str, str]:
        arguments = {
            "layers": [[layer.name, str(layer.path), list(layer.inputs), list(layer.outputs)] for layer in folded],
            "values": str(computed.folder),
        }
        with convert_errors("import", "checking the layers", ImportFailed, "checking the layers failed"):
            found: dict[str, str] = call_isolated(find_changed, arguments, work)
        return found

    return dict(work["cache"].get_or_compute(key, {"layers": len(folded)}, ask)[0])


def find_changed(layers: Sequence[tuple[str, str, Sequence[str], Sequence[str]]], values: str) -> dict[str, str]:
    """Implement :func:`find_changed_layers`. Runs in an isolated process."""
    from hil.controller.backends.references.runners.onnx import run_runtime

    computed = Activations(Path(values))
    found: dict[str, str] = {}
    for name, path, inputs, outputs in layers:
        layer = Layer(name, "", (), Path(path), tuple(inputs), tuple(outputs), 0)
        try:
            given, expected = select_layer_inputs(layer, computed), select_layer_outputs(layer, computed)
        except ReferenceFailed:  # a layer that does not depend on the model's inputs
            continue
        with contextlib.suppress(ReferenceFailed):  # ONNX Runtime cannot run the layer
            if change := find_difference(expected, run_runtime(path, given)):
                found[name] = f"the constants that hil computed for the layer changed {change}"
    return found
