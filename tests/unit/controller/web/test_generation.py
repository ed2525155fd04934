"""The page of a case with --generate: tokens side by side, divergence and times."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient
from support.generations import TIMES, make_position, stored_generation
from support.run_records import run_case
from support.web import asking, write_run, write_suite

from hil.controller.web.session.generation import HEIGHT, view_generation


def get(client: TestClient, **query: Any) -> str:
    answer = client.get(f"/case?{urlencode(query)}")
    assert answer.status_code == 200, answer.text[-800:]
    return answer.text


def text_of(page: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


POSITIONS = [
    make_position(1),
    make_position(2),
    make_position(3, kl=2.5, expected=7, actual=9, passed=False),
    make_position(4, kl="nan", actual=8),
]


@pytest.mark.parametrize("write", [write_run, write_suite])
def test_case_page_shows_tokens_side_by_side(tmp_path: Path, write: Any):
    generation = stored_generation(positions=POSITIONS, first_divergent=1).to_json()
    whole = run_case(generation=generation).to_json()
    write(tmp_path, "one", [{**(whole if write is write_run else {}), "name": "model", "generation": generation}])
    with asking(tmp_path) as client:
        page = get(client, id="one", case="model" if write is write_run else "case")
    text = text_of(page)
    assert "1 prompt 7 7 1e-09 0.5 2 0 7 7 1e-09 0.5 3 1 7 9 2.5 0.5 FAIL first divergence" in text
    assert "4 2 7 8 nan 0.5 near-tie" in text
    assert "KL by position, logarithmic (1e-09 to 2.5, bound 1e-06; x axis 1 to 4)" in text
    assert page.count("<polyline") == 3 and page.count('class="wrong"') == 2


def test_view_marks_wrong_positions_and_bound():
    found = view_generation(stored_generation(positions=POSITIONS).to_json())
    assert found is not None and [chart.title[:2] for chart in found.charts] == ["KL", "Ma", "Ti"]
    kl = found.charts[0]
    assert len(kl.line.split()) == 3  # without the position that is not a number
    assert kl.marks == [(666.7, 8)] and kl.limit is not None and 8 < kl.limit < HEIGHT


def test_view_of_long_generation_has_only_wrong_positions():
    positions = [make_position(place, passed=place != 600) for place in range(700)]
    found = view_generation(stored_generation(positions=positions).to_json())
    assert found is not None and [row.position for row in found.rows] == [600] and found.hidden == 699


@pytest.mark.parametrize(
    "values",
    [None, [], {"prompt": 3}, stored_generation(times={**TIMES, "step_ns": [1, 2]}).to_json() | {"steps": -1}],
)
def test_invalid_record_has_no_view(values: object):
    assert view_generation(values) is None


def test_huge_numbers_have_no_view():
    times = {**TIMES, "step_ns": [10**400, 1]}
    assert view_generation({**stored_generation().to_json(), "times": times}) is None


def test_case_page_shows_errors_of_the_cache_by_layer(tmp_path: Path):
    rows = [{"layer": layer, "keys": [0.01] * 6, "values": [0.01, 0.5, 0.5, 3, "nan", 20]} for layer in range(2)]
    cache = {"positions": 12, "stride": 2, "layers": 1, "rows": rows}
    values = stored_generation(cache=cache).to_json()
    found = view_generation(values)
    assert found is not None
    keys, errors = found.maps
    assert (keys.cells, keys.columns, keys.rows) == ([], 6, 2)
    assert [(cell.x, cell.y, cell.width, cell.level) for cell in errors.cells[:3]] == [
        (1, 0, 2, 1),
        (3, 0, 1, 2),
        (4, 0, 2, 3),
    ]
    write_run(tmp_path, "one", [{**run_case(generation=values).to_json(), "name": "model"}])
    with asking(tmp_path) as client:
        page = get(client, id="one", case="model")
    assert page.count('<rect class="level3"') == 3  # two rows, and the legend
    assert "largest error nan x the bound in layer 0, position 8" in text_of(page)
