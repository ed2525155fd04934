"""Simulate an ONNX Runtime with a defect, in every Python process with this directory in PYTHONPATH.

Python imports this module at startup. HIL_FAULTY_RUNTIME is KIND:NAME. The defect affects models that contain a node, a
weight or an operator of this name, if the optimizer is on. hil switches the optimizer off for references.

KIND is one of:
    weight    the session doubles the weight
    operator  the session negates the output of the node
    crash     the process aborts when it runs the model
    hang      the run never returns
    slow      the run takes 0.3 seconds more
"""

import importlib.machinery
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_MODULE = "onnxruntime.capi.onnxruntime_inference_collection"
_SLOW_S = 0.3


class _Finder:
    """Import finder that changes ONNX Runtime's sessions as soon as the module is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the import spec of ONNX Runtime's sessions with another loader, and None for other modules."""
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                kind, _, needed = os.environ["HIL_FAULTY_RUNTIME"].partition(":")
                _patch(module.InferenceSession, kind, needed)

            spec.loader.exec_module = execute_and_patch
        return spec


def _patch(sessions: Any, kind: str, needed: str) -> None:
    create = sessions.__init__

    def create_faulty(self: Any, model: Any, sess_options: Any = None, *others: Any, **more: Any) -> None:
        folder = None if isinstance(model, (bytes, bytearray, memoryview)) else Path(model).parent
        content = bytes(model) if folder is None else Path(model).read_bytes()
        if needed.encode() not in content or _is_exact(sess_options):
            create(self, model, sess_options, *others, **more)
        elif kind in ("weight", "operator"):
            changed = _change(content, folder, needed, is_weight=kind == "weight")
            create(self, changed, _set_folder(sess_options, folder), *others, **more)
        else:
            create(self, model, sess_options, *others, **more)
            self._sess = _Session(self._sess, kind)

    sessions.__init__ = create_faulty


def _is_exact(options: Any) -> bool:
    """Return whether the optimizer is off."""
    import onnxruntime

    level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options is not None and options.graph_optimization_level == level


def _set_folder(options: Any, folder: Path | None) -> Any:
    """Return session options with the directory of external weights, because the session gets the model as bytes."""
    import onnxruntime

    options = options or onnxruntime.SessionOptions()
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return options


def _change(content: bytes, folder: Path | None, needed: str, *, is_weight: bool) -> bytes:
    """Return the model with a wrong weight or node. Return other models unchanged."""
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load_model_from_string(content)
    graph = model.graph
    if is_weight:
        for tensor in graph.initializer:
            if tensor.name == needed:
                array = numpy_helper.to_array(tensor, str(folder or ""))
                tensor.CopyFrom(numpy_helper.from_array(array * array.dtype.type(2), needed))
        return model.SerializeToString()
    for place, node in enumerate(graph.node):
        if needed in (node.name, node.op_type):
            name, node.output[0] = node.output[0], f"{node.output[0]}_right"
            graph.node.insert(place + 1, helper.make_node("Neg", [node.output[0]], [name]))
            break
    return model.SerializeToString()


class _Session:
    """Session of ONNX Runtime whose runs crash, hang or are slow."""

    def __init__(self, session: Any, kind: str) -> None:
        self._session, self._kind = session, kind

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._session, name)
        if not name.startswith("run"):
            return value

        def run(*arguments: Any) -> Any:
            if self._kind == "crash":
                os.abort()
            time.sleep(1e6 if self._kind == "hang" else _SLOW_S)
            return value(*arguments)

        return run


if os.environ.get("HIL_FAULTY_RUNTIME"):
    sys.meta_path.insert(0, _Finder())
