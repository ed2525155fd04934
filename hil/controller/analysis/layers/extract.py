"""Takes a model apart: layers and cuts as files, and a layers.json about them. Called in the isolated process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.analysis.layers.graph import Graph
from hil.controller.analysis.layers.grouping import Group, groups_of
from hil.controller.analysis.layers.signature import content_of, signature_of
from hil.errors import UsageError, did_you_mean

LAYERS = "layers.json"
# A file's name ends at 255 bytes, and a case's id holds the model's name as well.
_LONGEST_OP = 60
_LONGEST_NAME = 120
_QUANTISERS = frozenset(["QuantizeLinear", "DequantizeLinear"])

Observed = Mapping[str, Sequence[Any]]


def extract(path: str, dims: Mapping[str, int], observed: Observed | None, folder: str, group: str) -> dict[str, Any]:
    """Write every layer of a model.

    Args:
        path: the ONNX model.
        dims: sizes of symbolic dimensions.
        observed: tensor -> [dtype, shape] as runs told it; None before there were any.
        folder: where to.
        group: ``node`` or ``fused``.

    Returns:
        ``open``: tensors of which not everything is known. Where there are any and nothing was observed yet, nothing
        was written.
    """
    graph = Graph(Path(path), dims, observed or {})
    if graph.open and observed is None:
        return {"open": graph.open}
    groups = groups_of(graph, fused=group == "fused")
    taken = [graph.takes(group.nodes) for group in groups]
    needed = {*graph.outputs, *(name for names in taken for name in names)}
    layers: list[dict[str, Any]] = []
    depths: dict[str, int] = {}
    kinds: dict[str, str] = {}
    contents: dict[str, str] = {}
    values: dict[str, str] = {}  # value between layers -> what tells it from those of others
    names = _names(graph, groups)
    for one, name, inputs in zip(groups, names, taken, strict=True):
        outputs = [value for number in one.own for value in graph.nodes[number].output if value in needed]
        depth = max((depths[value] + 1 for value in inputs if value in depths), default=0)
        depths.update(dict.fromkeys(outputs, depth))
        first = kinds.setdefault(signature_of(graph, one.nodes, outputs), name)
        content = content_of(graph, one.nodes, outputs, [values.get(value, value) for value in inputs])
        original = contents.setdefault(content, name)
        values.update({value: f"{content} {number}" for number, value in enumerate(outputs)})
        layers.append(
            {
                **_written(graph, one.nodes, inputs, outputs, name, Path(folder)),
                "depth": depth,
                "same_as": first if first != name else "",
                "copy_of": original if original != name else "",
            }
        )
    return _document(graph, layers, Path(folder))


def cut_out(
    path: str, dims: Mapping[str, int], observed: Observed | None, folder: str, group: str, start: str, end: str
) -> dict[str, Any]:
    """Write the part of a model from ``start`` to ``end`` as its only layer; for the rest see :func:`extract`.

    Raises:
        UsageError: there is no such place, ``end`` does not depend on ``start``, or a value at the edge is no tensor.
    """
    graph = Graph(Path(path), dims, observed or {})
    if graph.open and observed is None:
        return {"open": graph.open}
    first, last = (_place(graph, name, fused=group == "fused") for name in (start, end))
    chosen = set(graph.live)
    if isinstance(first, str):
        chosen &= graph.after([first])
    elif first.own:
        chosen &= {*first.own, *graph.after(_made(graph, first.own))}
    if isinstance(last, str):
        chosen &= graph.before([last])
    elif last.own:
        chosen &= {*last.own, *graph.before(_made(graph, last.own))}
    outputs = [name for name in _made(graph, chosen) if _is_end(graph, name, last)]
    if not outputs:
        what = f"{end!r} does not depend" if end else "no output of the model depends"
        raise UsageError(
            f"{what} on {repr(start) if start else 'any node'}",
            hint="--from comes before --to; `hil layers MODEL` shows what takes from what",
        )
    nodes = graph.with_constants(chosen | _copies(graph, chosen, first) | _copies(graph, chosen, last))
    inputs = graph.takes(nodes)
    for name in (*inputs, *outputs):
        if graph.type_of(name) is None:
            raise UsageError(
                f"{name!r}, which would be at the edge of the cut, is no tensor or has no known shape",
                hint="cut before the node that makes it, or after those that use it",
            )
    name = _safe(f"cut_{start or 'inputs'}_to_{end or 'outputs'}")
    layer = {
        **_written(graph, nodes, inputs, outputs, name, Path(folder)),
        "depth": 0,
        "same_as": "",
        "copy_of": "",
    }
    return _document(graph, [layer], Path(folder))


def _made(graph: Graph, numbers: Iterable[int]) -> list[str]:
    return [name for number in sorted(numbers) for name in graph.nodes[number].output if name]


def _is_end(graph: Graph, name: str, last: str | Group) -> bool:
    """Whether a value is what a cut ends with: the one named, or what nodes give to others."""
    if isinstance(last, str):
        return name == last
    if not last.own:
        return name in graph.outputs
    is_given = name in graph.outputs or not set(last.own).issuperset(graph.users.get(name, ()))
    return is_given and graph.producer[name] in last.own


def _copies(graph: Graph, chosen: Iterable[int], place: str | Group) -> set[int]:
    """What a layer that begins or ends a cut has copied from others, as far as it is used there."""
    if isinstance(place, str):
        return set()
    used = {name for number in chosen for name in graph.reads(number)}
    return {number for number in place.nodes if not used.isdisjoint(graph.nodes[number].output)}


def _document(graph: Graph, layers: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    (folder / LAYERS).write_text(json.dumps({"open": graph.open, "layers": layers}, indent=1))
    return {"open": graph.open}


def _written(
    graph: Graph, nodes: Sequence[int], inputs: Sequence[str], outputs: Sequence[str], name: str, folder: Path
) -> dict[str, Any]:
    file = folder / f"{name}.onnx"
    graph.save(nodes, inputs, outputs, file)
    return {
        "name": name,
        "file": file.name,
        "nodes": [graph.nodes[number].name for number in nodes],
        "op": "+".join(_operators(graph, nodes)),
        "by_chance": any(map(graph.draws, nodes)),
        "inputs": [_spec(graph, value) for value in inputs],
        "outputs": [_spec(graph, value) for value in outputs],
    }


def _spec(graph: Graph, name: str) -> list[Any]:
    known = graph.type_of(name)
    # A model's own output may be declared without a shape; its inputs may not.
    return [name, *known] if known else [name, "", []]


def _operators(graph: Graph, nodes: Iterable[int]) -> list[str]:
    """Operators in order; what quantises several values, one after another, is told once."""
    found: list[str] = []
    for number in nodes:
        operator = graph.nodes[number].op_type
        if not (found and found[-1] == operator and operator in _QUANTISERS):
            found.append(operator)
    return found


def _names(graph: Graph, groups: Sequence[Group]) -> list[str]:
    """A name for each layer: its operators, and the node that the layer is about."""
    names: list[str] = []
    for group in groups:
        operators = _operators(graph, group.nodes)
        text = "+".join(operators)
        if len(text) > _LONGEST_OP:
            text = f"{operators[0]}+{len(operators) - 2}_more+{operators[-1]}"
        main = [number for number in group.own if graph.nodes[number].op_type not in _QUANTISERS] or list(group.own)
        name = stem = _safe(f"{text}_{graph.nodes[main[0]].name}")
        number = 1
        while name in names:
            number += 1
            name = f"{stem}_{number}"
        names.append(name)
    return names


def _safe(text: str) -> str:
    return re.sub(r"_+", "_", re.sub(r"[^A-Za-z0-9._+-]", "_", text)).strip("_")[:_LONGEST_NAME]


def _place(graph: Graph, name: str, *, fused: bool) -> str | Group:
    """A value's name, or a node or a layer; one without nodes for ""."""
    if name in graph.runtime:
        return name
    if not name:
        return Group((), ())
    nodes = {graph.nodes[number].name: Group((number,), (number,)) for number in graph.live}
    groups = groups_of(graph, fused=fused)
    layers = dict(zip(_names(graph, groups), groups, strict=True))
    places: dict[str, Group] = layers | nodes
    if name not in places:
        known = [*places, *sorted(graph.runtime)]
        raise UsageError(
            f"the model has no tensor, node or layer {name!r} that depends on its inputs",
            hint=f"{did_you_mean(name, known)}`hil layers MODEL` lists the layers",
        )
    return places[name]
