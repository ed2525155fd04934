from __future__ import annotations

import itertools

import pytest

from hil.controller.analysis.graphs.layout import GAP_X, HEIGHT, WIDTH, lay_out, spread

CHAIN = [(number, number + 1) for number in range(4)]


def overlapping(found):
    places = sorted(zip(found["y"], found["x"], strict=True))
    return [(one, two) for one, two in itertools.pairwise(places) if one[0] == two[0] and two[1] - one[1] < WIDTH]


def test_layout_puts_chain_in_single_column():
    found = lay_out(5, CHAIN)
    assert len(set(found["x"])) == 1
    assert found["y"] == sorted(found["y"]) and len(set(found["y"])) == 5


@pytest.mark.parametrize(
    "edges",
    [
        [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)],
        [*CHAIN, (0, 4), (1, 3)],
        [(0, 2), (1, 2), (2, 3), (2, 4)],
        [],
    ],
)
def test_layout_puts_nodes_below_inputs_without_overlap(edges):
    found = lay_out(5, edges)
    assert not overlapping(found)
    assert all(found["y"][first] + HEIGHT < found["y"][last] for first, last in edges)
    assert all(WIDTH / 2 <= x <= found["width"] - WIDTH / 2 for x in found["x"])
    assert all(HEIGHT / 2 <= y <= found["height"] - HEIGHT / 2 for y in found["y"])


def test_layout_bends_edge_around_nodes():
    found = lay_out(5, [*CHAIN, (0, 4)])
    (bends,) = found["bends"].values()
    assert len(bends) == 2 * 3
    at = dict(zip(found["y"], found["x"], strict=True))
    assert all(abs(at[y] - x) >= WIDTH for x, y in zip(bends[::2], bends[1::2], strict=True))


def test_layout_puts_sources_just_above_consumer():
    found = lay_out(6, [*CHAIN, (5, 4)])
    assert found["y"][5] == found["y"][3]


def test_layout_accepts_cycles_and_self_edges():
    found = lay_out(3, [(0, 1), (1, 2), (2, 1), (1, 1)])
    assert len(found["x"]) == 3


def test_layout_accepts_missing_nodes_and_edges():
    assert lay_out(0, [])["width"] == 0
    apart = lay_out(9, [])
    assert len(set(zip(apart["x"], apart["y"], strict=True))) == 9 and apart["width"] < 2 * apart["height"]
    assert apart["y"] == sorted(apart["y"]), "in rows, in their order"


def test_spread_preserves_gap_between_nearest_places():
    assert spread([0, 0, 10], 4) == [-2, 2, 10]
    assert spread([5, 1], GAP_X)[1] - spread([5, 1], GAP_X)[0] == GAP_X
    assert spread([], 1) == []


def test_layout_handles_long_chain_without_recursion():
    found = lay_out(20_000, [(number, number + 1) for number in range(19_999)])
    assert len(set(found["y"])) == 20_000
