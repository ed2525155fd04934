"""Reasons why nodes of a program did not run on the requested device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# Maximum number of node names of a part, and of all its reasons.
MAX_NAMES = 200
MAX_REASONS = 20
MAX_REASON_CHARS = 300
# Number of node names in a message.
SHOWN_NAMES = 8


@dataclass(frozen=True)
class PlacementReason:
    """Why nodes of a program did not run on the requested device, in the words of the runtime or of its compiler."""

    text: str
    nodes: int = 0  # number of nodes with this reason; 0 if unknown
    names: tuple[str, ...] = ()  # names of these nodes, as in the part

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PlacementReason:
        """Create a reason from the result of :meth:`to_json`."""
        return cls(values["text"], values["nodes"], tuple(values["names"]))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {"text": self.text, "nodes": self.nodes, "names": list(self.names)}


def group_reasons(found: Iterable[tuple[str, str]]) -> tuple[PlacementReason, ...]:
    """Group pairs of a reason and a node name by reason, the most frequent first.

    Stores at most :data:`MAX_REASONS` reasons, of at most :data:`MAX_REASON_CHARS` characters, and at most
    :data:`MAX_NAMES` names in total.
    """
    grouped: dict[str, list[str]] = {}
    for text, name in found:
        grouped.setdefault(" ".join(text.split())[:MAX_REASON_CHARS], []).append(name)
    most = sorted(grouped.items(), key=lambda pair: -len(pair[1]))[:MAX_REASONS]
    left = MAX_NAMES
    reasons = []
    for text, names in most:
        reasons.append(PlacementReason(text, len(names), tuple(names[:left])))
        left -= len(reasons[-1].names)
    return tuple(reasons)


def match_compiler_reasons(
    names: Sequence[str], nodes: int, reasons: Mapping[str, Mapping[str, int]]
) -> tuple[PlacementReason, ...]:
    """Return the compiler's reasons for the calls of a part.

    Args:
        names: operators of the calls in the program, such as ``aten::add.out``; at most :data:`MAX_NAMES`.
        nodes: number of calls.
        reasons: operator in the compiler's graph, such as ``aten.add.Tensor`` -> reason -> number of nodes.
    """
    # A program calls variants of the operators: only namespace and name are the same.
    by_operator: dict[str, Counter[str]] = {}
    for operator, found in reasons.items():
        by_operator.setdefault(".".join(operator.split(".")[:2]), Counter()).update(found)
    pairs = []
    for name in names:
        operator = name.replace("::", ".").rpartition(".")[0]
        if operator in by_operator:
            # If nodes with the same operator have several reasons, the program does not contain which call is which.
            pairs.append((" or: ".join(by_operator[operator]), name))
    grouped = group_reasons(pairs)
    if nodes <= len(names):
        return grouped
    totals: Counter[str] = Counter()
    for known in by_operator.values():
        totals[" or: ".join(known)] += sum(known.values())
    return tuple(replace(one, nodes=max(one.nodes, totals[one.text])) for one in grouped)


def format_reasons(
    reasons: Iterable[tuple[str, int, Sequence[str]]], nodes: int, device: str, runtime: str
) -> list[str]:
    """Format why the nodes of a part ran on its device, a line per reason.

    Args:
        reasons: (text, number of nodes, names) of each reported reason.
        nodes: number of nodes of the part; 0 if unknown.
        device: the part's device.
        runtime: name of the runtime, for nodes without a reported reason.
    """
    listed = list(reasons)
    lines = [f"{_count_on(count, device)}: {text}{_format_names(names, count)}" for text, count, names in listed]
    left = nodes - sum(count for _, count, _ in listed)
    if left > 0 or not listed:
        lines.append(f"{_count_on(max(left, 0), device)}: reason not reported by {runtime}")
    return lines


def _count_on(nodes: int, device: str) -> str:
    return f"{count_nodes(nodes)} on {device}" if nodes else f"on {device}"


def _format_names(names: Sequence[str], nodes: int) -> str:
    shown = list(names[:SHOWN_NAMES])
    left = nodes - len(shown)
    return f" ({', '.join(shown)}{f' and {left} more' if left > 0 else ''})" if shown else ""


def count_nodes(nodes: int) -> str:
    """Format a number of nodes."""
    return f"{nodes} node{'s' * (nodes != 1)}"
