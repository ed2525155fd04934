"""Lay out large graphs in ranks from top to bottom, nodes below their inputs.

The browser lays out small graphs with dagre. dagre needs ten seconds for 5,000 nodes, and the stack overflows on long
chains. This layout takes less than a second: longest paths define the ranks, and barycentres the order within a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# Node size and gaps between nodes, as on the page.
WIDTH, HEIGHT, GAP_X, GAP_Y = 150.0, 40.0, 24.0, 44.0
# Edges over more ranks than this are drawn as a curve around the nodes, not routed between them.
_MAX_EDGE_RANKS = 12
_SWEEPS = 6
# Maximum bends per node, on average over the graph. This limits the cost of long edges.
_MAX_BENDS = 4
# For every node: the nodes above it, and the nodes below it.
_Neighbours = tuple[list[list[int]], list[list[int]]]


def lay_out(count: int, edges: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Lay out a graph.

    Args:
        count: number of nodes.
        edges: pairs of node indices. Edges that close a cycle are drawn, but do not affect the layout.

    Returns:
        ``x``, ``y``: node centres; ``bends``: edge index -> bend points ``[x, y, ...]``; ``width``,
        ``height``: the total size. A graph without edges is laid out in rows, in node order.
    """
    if not count:
        return {"x": [], "y": [], "bends": {}, "width": 0.0, "height": 0.0}
    if not edges:
        return _lay_out_square(count)
    order = _sort_topologically(count, edges)
    placed = {node: number for number, node in enumerate(order)}
    forward = [number for number, (first, last) in enumerate(edges) if placed[first] < placed[last]]
    ranks = _assign_ranks(count, order, [edges[number] for number in forward])
    links, chains = _insert_bends(ranks, edges, forward)
    near = _list_neighbours(len(ranks), links)
    rows = _order_rows(ranks, near, placed)
    across = _compute_x_positions(rows, near)
    least = min(across)
    x = [round(value - least + WIDTH / 2, 1) for value in across]
    y = [round(rank * (HEIGHT + GAP_Y) + HEIGHT / 2, 1) for rank in ranks]
    bends = {number: [value for bend in chain for value in (x[bend], y[bend])] for number, chain in chains.items()}
    return {
        "x": x[:count],
        "y": y[:count],
        "bends": bends,
        "width": max(x) + WIDTH / 2,
        "height": max(y) + HEIGHT / 2,
    }


def _lay_out_square(count: int) -> dict[str, Any]:
    """Lay out nodes row by row in an approximate square."""
    a_row = max(1, round(math.sqrt(count * (HEIGHT + GAP_Y) / (WIDTH + GAP_X))))
    x = [number % a_row * (WIDTH + GAP_X) + WIDTH / 2 for number in range(count)]
    y = [number // a_row * (HEIGHT + GAP_Y) + HEIGHT / 2 for number in range(count)]
    return {"x": x, "y": y, "bends": {}, "width": max(x) + WIDTH / 2, "height": max(y) + HEIGHT / 2}


def _sort_topologically(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the nodes in topological order. Nodes on or behind a cycle follow in index order."""
    after: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for first, last in edges:
        after[first].append(last)
        waiting[last] += 1
    ready = [node for node in range(count) if not waiting[node]]
    for node in ready:
        for follower in after[node]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    seen = set(ready)
    return ready + [node for node in range(count) if node not in seen]


def _assign_ranks(count: int, order: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the rank of every node, which is below the ranks of its inputs.

    A node without inputs is placed just above its users.
    """
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for first, last in edges:
        before[last].append(first)
        after[first].append(last)
    ranks = [0] * count
    for node in order:
        ranks[node] = max((ranks[one] + 1 for one in before[node]), default=0)
    for node in order:
        if not before[node] and after[node]:
            ranks[node] = min(ranks[one] for one in after[node]) - 1
    return ranks


def _insert_bends(
    ranks: list[int], edges: Sequence[tuple[int, int]], forward: Sequence[int]
) -> tuple[list[tuple[int, int]], dict[int, list[int]]]:
    """Append a bend for every rank that a short edge crosses.

    Returns:
        The links between adjacent ranks, and edge index -> bends.
    """
    links: list[tuple[int, int]] = []
    chains: dict[int, list[int]] = {}
    left = _MAX_BENDS * len(ranks)
    for number in forward:
        first, last = edges[number]
        between = range(ranks[first] + 1, ranks[last])
        if not between or len(between) > _MAX_EDGE_RANKS or len(between) > left:
            links.append((first, last))
            continue
        left -= len(between)
        chain = list(range(len(ranks), len(ranks) + len(between)))
        ranks.extend(between)
        chains[number] = chain
        links += zip([first, *chain], [*chain, last], strict=True)
    return links, chains


def _order_rows(ranks: Sequence[int], near: _Neighbours, placed: dict[int, int]) -> list[list[int]]:
    """Return every rank's nodes from left to right, ordered to reduce crossings."""
    rows: list[list[int]] = [[] for _ in range(max(ranks) + 1)]
    for node, rank in enumerate(ranks):
        rows[rank].append(node)
    for row in rows:
        row.sort(key=lambda node: placed.get(node, node))
    at = [0.0] * len(ranks)
    # Rows with a single node need no ordering.
    several = [row for row in rows if len(row) > 1]
    for row in several:
        _center_row(row, at)
    for sweep in range(_SWEEPS):
        side = near[sweep % 2]
        for row in several if sweep % 2 == 0 else reversed(several):
            middle = {node: _average_position(side[node], at, at[node]) for node in row}
            row.sort(key=middle.__getitem__)
            _center_row(row, at)
    return rows


def _center_row(row: Sequence[int], at: list[float]) -> None:
    """Set the positions of a row's nodes, centred on 0, so that all rows are aligned."""
    for number, node in enumerate(row):
        at[node] = number - (len(row) - 1) / 2


def _compute_x_positions(rows: Sequence[Sequence[int]], near: _Neighbours) -> list[float]:
    """Return the x coordinate of every node, as close to its neighbours as the other nodes of the rank allow."""
    at = [0.0] * len(near[0])
    for row in rows:
        for number, node in enumerate(row):
            at[node] = (number - (len(row) - 1) / 2) * (WIDTH + GAP_X)
    for sweep in range(_SWEEPS):
        side = near[sweep % 2]
        for row in rows if sweep % 2 == 0 else reversed(rows):
            if len(row) == 1:
                at[row[0]] = _average_position(side[row[0]], at, at[row[0]])
                continue
            wanted = [_average_position(side[node], at, at[node]) for node in row]
            for node, value in zip(row, spread(wanted, WIDTH + GAP_X), strict=True):
                at[node] = value
    return at


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Return the positions nearest to ``wanted``, in order and at least ``gap`` apart.

    The algorithm is pool adjacent violators.
    """
    blocks: list[tuple[float, int]] = []  # (mean over members of wanted position minus gap, number of members)
    for number, value in enumerate(wanted):
        mean, size = value - number * gap, 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean = (before * count + mean * size) / (count + size)
            size += count
        blocks.append((mean, size))
    flat = [mean for mean, size in blocks for _ in range(size)]
    return [mean + number * gap for number, mean in enumerate(flat)]


def _list_neighbours(count: int, links: Sequence[tuple[int, int]]) -> _Neighbours:
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for first, last in links:
        above[last].append(first)
        below[first].append(last)
    return above, below


def _average_position(nodes: Sequence[int], at: Sequence[float], otherwise: float) -> float:
    """Return the mean position of nodes, or ``otherwise`` if there are no nodes.

    ``fsum`` is used only for more than two nodes: most nodes have one or two neighbours, whose sum is exact.
    """
    if not nodes:
        return otherwise
    if len(nodes) == 1:
        return at[nodes[0]]
    if len(nodes) == 2:
        return (at[nodes[0]] + at[nodes[1]]) / 2
    return math.fsum([at[one] for one in nodes]) / len(nodes)
