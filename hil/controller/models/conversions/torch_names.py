"""What the operators of an exported program are called: by the module that they were written in.

``blocks.1.attn.qkv`` is all that a module of ``torch.nn`` does in one operator. Where a module does more than that, its
operators are told apart: ``blocks.1.attn.softmax_1``.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

# Kept through decompositions by torch.fx, and written into archives.
_META = "custom"
_NAME = "hil.name"
_ONNX = "pkg.torch.onnx."
_LIBRARY = "torch.nn.modules."


def mark(program: Any) -> dict[str, str]:
    """Note on every node what it is called, where a decomposition finds it again; returns name -> type, in order."""
    types: dict[str, str] = {}
    nodes = [node for graph in graphs(program) for node in graph.nodes if node.op == "call_function"]
    places = [_place(node) for node in nodes]
    shared = Counter(places)
    for node, (path, kind) in zip(nodes, places, strict=True):
        alone = shared[path, kind] == 1
        name, type_ = called(path, kind if alone else "", node.name, _operator(node.target))
        node.meta[_META] = {**(node.meta.get(_META) or {}), _NAME: name}
        types[name] = type_
    return types


def graphs(program: Any) -> Iterator[Any]:
    """A program's graph, and those of its branches and loops."""
    import torch

    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield module.graph


def marked(node: Any) -> str:
    """The name of a node of a marked program, decomposed or not; empty where it is not known."""
    return str((node.meta.get(_META) or {}).get(_NAME, ""))


def called(path: str, kind: str, node: str, operator: str) -> tuple[str, str]:
    """Name and type of an operator.

    Args:
        path: of the innermost module that it is in, such as ``blocks.1.attn``; "" is the model itself.
        kind: that module's class, such as ``torch.nn.modules.linear.Linear``.
        node: the operator's own name in the graph, such as ``softmax_1``.
        operator: what it does, such as ``softmax``.
    """
    if path and kind.startswith(_LIBRARY):
        return path, kind.rpartition(".")[2]
    return f"{path}.{node}" if path else node, operator


def name_onnx_nodes(model: Any) -> None:
    """Call the nodes of an ONNX model that torch's exporter wrote by module instead of ``node_conv2d_3``.

    Where several nodes stand for one module, each adds its own operator: ``gru.Squeeze``.
    """
    from hil.controller.models.importers.onnx import nodes_of

    nodes = list(nodes_of(model.graph.node))
    nodes += [node for function in model.functions for node in nodes_of(function.node)]
    names = [_onnx_name(node) for node in nodes]
    shared = Counter(names)
    taken: Counter[str] = Counter()
    for node, name in zip(nodes, names, strict=True):
        if not name:
            continue
        full = f"{name}.{node.op_type}" if shared[name] > 1 else name
        taken[full] += 1
        node.name = full if taken[full] == 1 else f"{full}_{taken[full] - 1}"


def _onnx_name(node: Any) -> str:
    said: Mapping[str, str] = {entry.key: entry.value for entry in node.metadata_props}
    try:
        scopes, classes = (ast.literal_eval(said[_ONNX + key]) for key in ("name_scopes", "class_hierarchy"))
    except (KeyError, ValueError, SyntaxError):
        return ""
    if not scopes:
        return ""
    path, kind = _known((str(scopes[-2]), str(classes[-2]))) if len(scopes) > 1 else ("", "")
    return called(path, kind, str(scopes[-1]), node.op_type)[0]


def _place(node: Any) -> tuple[str, str]:
    """Path and class of the innermost module that a node is in; empty where it is the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return _known((stack[-1][0], _text(stack[-1][1]))) if stack else ("", "")


def _known(place: tuple[str, str]) -> tuple[str, str]:
    """The operators that torch itself adds, on sizes, are in a module of this name."""
    return ("", "") if place[0] == "_empty_nn_module_stack_from_metadata_hook" else place


def _operator(target: Any) -> str:
    """``aten.softmax.int`` is a softmax."""
    schema = getattr(target, "_schema", None)
    return str(schema.name).rpartition("::")[2] if schema is not None else str(getattr(target, "__name__", target))


def _text(kind: Any) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
