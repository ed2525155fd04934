"""A model that returns its intermediates: the same graph with more outputs.

What is returned must be computed and kept, so a compiler fuses less across it than in the model as it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated, IsolatedCrash, IsolatedFailure, IsolatedTimeout
from hil.core.artifacts import Model
from hil.core.tensors import TensorSpec
from hil.errors import ImportFailed, StageTimeout

_VERSION = 2
_NAME = "exposed.onnx"


def expose(
    model: Model,
    tensors: Sequence[TensorSpec],
    *,
    only: bool = False,
    cache: Cache,
    isolated: Isolated,
    timeout: float | None,
    log: Path,
) -> Path:
    """Make an ONNX model that returns these tensors of it after its own outputs.

    Args:
        model: an ONNX model.
        tensors: any that its nodes make, with dtypes and shapes; those that it returns anyway stay where they are. The
            shapes are written into a model of fixed shapes only.
        only: return nothing else, and leave out every node that these do not need.
        cache: where it is kept.
        isolated: where it is made.
        timeout: seconds, or None.
        log: what is printed meanwhile is appended here.

    Returns:
        Its file, in the cache.

    Raises:
        ImportFailed: it cannot be made.
        StageTimeout: it took too long.
    """
    fixed = all(isinstance(dim, int) for spec in model.inputs or () for dim in spec.shape)
    specs = [[spec.name, spec.dtype, [dim if fixed else None for dim in spec.shape]] for spec in tensors]
    key = Cache.key("exposed", model=model.digest, tensors=specs, only=only, version=_VERSION)

    def make(folder: Path) -> None:
        files = {name: str(path.absolute()) for name, path in model.files.items() if path != model.path}
        arguments = {"model": str(model.path.absolute()), "files": files, "tensors": specs, "only": only}
        try:
            isolated.call(write, {**arguments, "folder": str(folder)}, timeout=timeout, log=log)
        except IsolatedTimeout as error:
            raise StageTimeout(
                f"exposing intermediates {error.message}", stage="import", detail=error.detail
            ) from error
        except (IsolatedCrash, IsolatedFailure) as error:
            text = f"the intermediates of {model.path.name} cannot be made outputs: {error.message}"
            raise ImportFailed(text, stage="import", detail=error.detail) from error

    entry, _ = cache.get_or_make(key, {"model": model.name, "outputs": len(specs)}, make)
    return entry / _NAME


def write(model: str, files: dict[str, str], tensors: list[Any], only: bool, folder: str) -> None:
    """Write the model and its external data into a folder; called in the isolated process."""
    import onnx
    from onnx import inliner

    from hil.formats.ort_values import ONNX_TYPES

    proto = onnx.load(model, load_external_data=False)
    if proto.functions:
        # As it was when it was taken apart: the tensors within are those of the nodes that functions consist of.
        proto = inliner.inline_local_functions(proto)
    graph = proto.graph
    if only:
        wanted = {name for name, _, _ in tensors}
        kept = [output for output in graph.output if output.name in wanted]
        del graph.output[:]
        graph.output.extend(kept)
    there = {output.name for output in graph.output}
    for name, dtype, shape in tensors:
        if name not in there:
            graph.output.append(onnx.helper.make_tensor_value_info(name, ONNX_TYPES[dtype], shape))
    if only:
        needed = _needed(graph)
        del graph.node[:]
        graph.node.extend(needed)
    # A tensor is described once: as an output.
    outputs = {output.name for output in graph.output}
    inner = [value for value in graph.value_info if value.name not in outputs]
    del graph.value_info[:]
    graph.value_info.extend(inner)
    onnx.save(proto, Path(folder) / _NAME)
    for name, source in files.items():
        target = Path(folder) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _needed(graph: Any) -> list[Any]:
    """The nodes that the graph's outputs need, in order."""
    from hil.controller.analysis.layers.graph import reads

    wanted = {output.name for output in graph.output}
    kept = []
    for node in reversed(graph.node):
        if wanted.isdisjoint(node.output):
            continue
        kept.append(node)
        wanted.update(reads(node))
    return kept[::-1]
