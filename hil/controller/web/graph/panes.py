"""Data of a drawn graph: visible nodes and closed scopes with positions, colors and texts."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hil.controller.analysis.graphs.colours import ColourScale, choose_text_colour
from hil.controller.analysis.graphs.layout import lay_out
from hil.controller.analysis.graphs.scopes import (
    FoldedItem,
    Scope,
    choose_open_scopes,
    fold,
    list_outer_scopes,
)
from hil.controller.analysis.graphs.values import NodeValue, find_worst
from hil.controller.storage.screen.texts import format_count, format_seconds
from hil.controller.web.graph.graphs import GraphSide
from hil.controller.web.templating import number
from hil.controller.web.text.entries import is_failure
from hil.controller.web.text.parameters import InvalidParameter
from hil.core.text import escape_controls

ALL, NONE = "all", "none"
_SCOPE_METRICS = ("tolerance_ratio", "max_abs")


@dataclass(frozen=True)
class ScopeSummary:
    """Scope of a graph with the results of its nodes."""

    scope: Scope
    failing: int
    worst: Mapping[str, NodeValue]  # metric -> result of the node with the largest value; without unknown metrics


class OpenScopes:
    """Open scopes of the graphs on a page. Both graphs open the same scopes.

    Args:
        text: the URL parameter: ``all``, ``none``, numbers of scopes, or "" for the default.
        shown: names of nodes that must be visible, one per side; "" for none.

    Raises:
        InvalidParameter: a scope does not exist.
    """

    def __init__(self, sides: Sequence[GraphSide], text: str, shown: Sequence[str]) -> None:
        self.paths = sorted({path for side in sides for path in side.scopes})
        self._numbers = {path: place for place, path in enumerate(self.paths)}
        self.opened = self._parse(text) if text else self._choose_default(sides, shown)
        for side, name in zip(sides, shown, strict=True):
            self.opened |= set(_list_scopes_around(side, name))

    def _parse(self, text: str) -> set[str]:
        if text in (ALL, NONE):
            return set(self.paths) if text == ALL else set()
        found = set()
        for one in text.split(","):
            if not (one.isdecimal() and len(one) < 7 and int(one) < len(self.paths)):
                raise InvalidParameter(
                    f"invalid open scope {one[:40]!r}", hint=f"use {ALL}, {NONE}, or numbers of scopes"
                )
            found.add(self.paths[int(one)])
        return found

    @staticmethod
    def _choose_default(sides: Sequence[GraphSide], shown: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for side, name in zip(sides, shown, strict=True):
            place = side.places.get(name)
            found |= choose_open_scopes(side.scopes, len(side.graph.nodes), [] if place is None else [place])
        return found

    def number_of(self, path: str) -> int:
        """Return the number of a scope in the URL parameter."""
        return self._numbers[path]

    def format(self, opened: Collection[str] | None = None) -> str:
        """Return the URL parameter for these open scopes, by default for the current ones."""
        chosen = self.opened if opened is None else opened
        if not chosen:
            return NONE
        if len(chosen) == len(self.paths):
            return ALL
        return ",".join(str(self._numbers[path]) for path in sorted(chosen))


def _list_scopes_around(side: GraphSide, name: str) -> list[str]:
    """Return the scopes that must be open to show a node or a scope."""
    if (scope := find_named_scope(side, name)) is not None:
        return list_outer_scopes(side.scopes, scope.path)
    place = side.places.get(name)
    inner = "" if place is None else side.inner_scopes.get(place, "")
    return [inner, *list_outer_scopes(side.scopes, inner)] if inner else []


def find_named_scope(side: GraphSide, name: str) -> Scope | None:
    """Return the scope with the name of a group in the graph, or None."""
    return side.scopes.get(name[:-1]) if name.endswith("/") and name not in side.places else None


def summarize_scope(side: GraphSide, scope: Scope) -> ScopeSummary:
    """Count the failing nodes of a scope, and find the worst node by each error."""
    found = list(_iter_values(side, scope.members))
    worst = {}
    for name in _SCOPE_METRICS:
        known = [one for one in found if one.get_metric(name) is not None]
        if known:
            worst[name] = max(known, key=operator.attrgetter(name))
    return ScopeSummary(scope, sum(map(is_failing, found)), worst)


def _iter_values(side: GraphSide, places: Iterable[int]) -> Iterable[NodeValue]:
    names = (side.graph.nodes[place].name for place in places)
    return (side.values[name] for name in names if name in side.values)


def make_pane_data(side: GraphSide, scale: ColourScale, scopes: OpenScopes) -> dict[str, Any]:
    """Return the data of a graph for the page's script."""
    nodes = side.graph.nodes
    view = fold(side.graph, side.scopes, scopes.opened)
    layout = lay_out(len(view.items), view.edges) if view.has_groups else side.layout
    wrong = [
        place for place, node in enumerate(nodes) if node.name in side.values and is_failing(side.values[node.name])
    ]
    failing = frozenset(wrong)
    drawn = [_make_item(side, item, scale, scopes, failing) for item in view.items]
    return {
        "title": escape_controls(side.title),
        **{key: [one[key] for one in drawn] for key in _ITEM_KEYS},
        "edges": view.edges,
        "layout": layout,
        "inks": [choose_text_colour(one["colours"]) if one["colours"] else "" for one in drawn],
        "failing": [place for place, one in enumerate(drawn) if one["fails"]],
        # Failing nodes in the order of the graph, also those in closed scopes: (index in the graph, name).
        "wrong": [(place, nodes[place].name) for place in wrong],
        "open": scopes.format(),
        "groups": [f"{path}/" for path in scopes.paths],
        "opened": sorted(map(scopes.number_of, scopes.opened)),
    }


# order: index of the first node. scopes: number of a closed scope; -1 for a node. inside: number of the innermost scope
# around a node; -1 without scopes. fails: number of failing nodes.
_ITEM_KEYS = (
    "names",
    "labels",
    "shorts",
    "ops",
    "kinds",
    "match",
    "colours",
    "texts",
    "order",
    "scopes",
    "inside",
    "fails",
)


def _make_item(
    side: GraphSide, item: FoldedItem, scale: ColourScale, scopes: OpenScopes, failing: frozenset[int]
) -> dict[str, Any]:
    if item.scope:
        return _make_group(side, side.scopes[item.scope], scale, scopes, failing)
    place = item.members[0]
    node = side.graph.nodes[place]
    value = side.values.get(node.name)
    inner = side.inner_scopes.get(place)
    return {
        "names": node.name,
        "labels": escape_controls(node.label or node.name)[:200],
        "shorts": escape_controls(_shorten(node.label or node.name, inner))[:200],
        "ops": escape_controls(node.op)[:60],
        "kinds": node.kind,
        "match": [node.name, *node.within] if side.kind != "onnx" else [node.name],
        "colours": scale.choose_colour(value),
        "texts": format_metric(scale.metric, value),
        "order": place,
        "scopes": -1,
        "inside": scopes.number_of(inner) if inner else -1,
        "fails": int(place in failing),
    }


def _shorten(label: str, scope: str | None) -> str:
    """Return a node's label without the scope around it, which the graph shows open."""
    for start in (f"/{scope}/", f"{scope}/", f"{scope}.".replace("/", ".")) if scope else ():
        if label.startswith(start):
            return label[len(start) :]
    return label


def _make_group(
    side: GraphSide, scope: Scope, scale: ColourScale, scopes: OpenScopes, failing: frozenset[int]
) -> dict[str, Any]:
    """Return the data of a closed scope. Its color is the color of the worst node."""
    values = [value for value in _iter_values(side, scope.members) if value.get_metric(scale.metric) is not None]
    worst = _find_worst_by_metric(values, scale)
    fails = sum(place in failing for place in scope.members)
    known = format_metric(scale.metric, worst) if worst is not None else ""
    if known and scale.metric in ("tolerance_ratio", "max_abs", "time_ns"):
        known = f"max {known}"
    return {
        "names": scope.name,
        "labels": escape_controls(scope.name)[:200],
        "shorts": escape_controls(f"{scope.label}/")[:200],
        "ops": format_count(len(scope.members), "node"),
        "kinds": "group",
        "match": [scope.name, *(side.graph.nodes[place].name for place in scope.members)],
        "colours": scale.choose_colour(worst),
        "texts": f"{fails} failing" if fails else known,
        "order": scope.members[0],
        "scopes": scopes.number_of(scope.path),
        "inside": scopes.number_of(scope.parent) if scope.parent else -1,
        "fails": fails,
    }


def _find_worst_by_metric(values: Sequence[NodeValue], scale: ColourScale) -> NodeValue | None:
    """Return the value whose color represents multiple nodes; None without values, or on multiple devices."""
    if not values:
        return None
    if scale.metric == "placement":
        return values[0] if len({one.placement for one in values}) == 1 else None
    if scale.metric == "outcome":
        return find_worst(values)
    return max(values, key=lambda one: scale.level(float(one.get_metric(scale.metric) or 0.0)))


def find_first_failing(side: GraphSide) -> str:
    """Return the first failing node, in the order of the graph; "" without failures.

    A bisection's first wrong layer has priority.
    """
    wrong = [name for name in _list_names(side) if is_failing(side.values[name])]
    first = [name for name in wrong if side.first_layer and side.values[name].layer == side.first_layer]
    return next(iter(first or wrong), "")


def _list_names(side: GraphSide) -> list[str]:
    return [node.name for node in side.graph.nodes if node.name in side.values]


def is_failing(value: NodeValue) -> bool:
    """Return True if a node's outcome is a failure."""
    return bool(value.outcome) and value.outcome != "PASS" and is_failure(value.outcome)


def format_metric(metric: str, value: NodeValue | None) -> str:
    """Format a node's value of a metric. A missing value becomes ""."""
    found = value.get_metric(metric) if value is not None else None
    if value is None or found is None:
        return ""
    if isinstance(found, str):
        return escape_controls(found)
    if metric == "time_ns":
        return format_seconds(found / 1e9)
    if metric == "tolerance_ratio" and value.is_ratio_bound:
        return f"≤ {number(found)}"
    return f"{number(found)} dB" if metric == "sqnr_db" else number(found)


def list_scopes(sides: Sequence[GraphSide], most: int) -> list[ScopeSummary]:
    """Return the scopes of the first graph: those with the most failing nodes first, then in the order of the graph."""
    side = sides[0]
    found = [summarize_scope(side, scope) for scope in side.scopes.values()]
    found.sort(key=lambda one: (-one.failing, one.scope.members[0], -len(one.scope.members)))
    return found[:most]
