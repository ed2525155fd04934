"""Test the tensor pages: all dtypes and ranks, missing data, and cell values."""

from __future__ import annotations

import base64
import json
import re
import threading
import tracemalloc
from html import unescape
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.waiting import eventually
from support.web import asking, write_run, write_suite
from support.web_tensors import write_tensors

from hil.controller.web.files.cached import Results
from hil.controller.web.tensors import view
from hil.controller.web.tensors.view import MAX_BYTES, TensorView
from hil.core.npy import save_npy
from hil.core.tensors import DTYPES, parse_dtype
from hil.errors import UsageError

NAN, INF = float("nan"), float("inf")


def page(client: Any, name: str, **query: Any) -> str:
    answer = client.get("/tensors", params={"id": "run", "case": "model", "output": name, **query})
    assert answer.status_code == 200, answer.text
    return str(answer.text)


@pytest.mark.ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_page_opens_every_dtype(tmp_path, dtype):
    random = np.random.default_rng(0)
    if dtype == "string":
        a, b = (np.array([["a", "<b>"], ["\x1b", other]], object) for other in ("x", "y"))
    else:
        a, b = (random.integers(0, 2, (3, 4)).astype(parse_dtype(dtype)) for _ in range(2))
    write_tensors(tmp_path, {"y": a}, {"y": b}, {"x": a})
    with asking(tmp_path) as client:
        text = page(client, "y")
        assert dtype in text and ("<b>" not in text)
        assert "In the record" in text and "FAIL" in text
        assert dtype in page(client, "x", kind="inputs")
        given = {"id": "run", "case": "model", "output": "y", "row": 0, "column": 0}
        assert client.get("/api/tensors/cell", params=given).status_code == (404 if dtype == "string" else 200)


@pytest.mark.ci
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (2,) * 8])
@pytest.mark.parametrize("value", [1.0, NAN, INF])
def test_tensor_page_opens_every_rank(tmp_path, shape, value):
    a = np.full(shape, value, np.float32)
    write_tensors(tmp_path, {"y": a}, {"y": a * 2})
    with asking(tmp_path) as client:
        text = page(client, "y")
        assert ("This tensor has 0 elements" in text) == (a.size == 0)
        if len(shape) > 1 and a.size:
            assert "axis 1 (2)" in page(client, "y", rows=7, columns=1, i0=1, i5=1)


def test_tensor_page_recomputes_statistics_for_tolerance(tmp_path):
    b = np.linspace(1, 2, 100, dtype=np.float32)
    a = b.copy()
    a[3] += 0.5
    a[50] += 0.01
    write_tensors(tmp_path, {"y": a}, {"y": b})
    with asking(tmp_path) as client:
        assert found(page(client, "y"), "mismatches") == "2 of 100"
        loose = page(client, "y", rtol="0", atol="0.1")
        assert found(loose, "mismatches") == "1 of 100" and "2 of 100" in loose
        assert "PASS" in found(page(client, "y", atol="0.6"), "judged")
        assert "tolerance rejected: " in found(page(client, "y", atol="1.9"), "judged")
        for wrong in ("x", "-1", "nan"):
            assert client.get("/tensors", params={"id": "run", "case": "model", "rtol": wrong}).status_code == 400


def found(text: str, element: str) -> str:
    """Return the text of an element."""
    match = re.search(rf'id="{element}"[^>]*>(.*?)</(?:td|p)>', text, re.DOTALL)
    assert match, text[:3000]
    return unescape(re.sub(r"<[^>]+>", "", match[1])).strip()


def test_tensor_page_links_worst_elements(tmp_path):
    b = np.zeros((2, 3, 40, 50), np.float32) + 1
    a = b.copy()
    a[1, 2, 30, 40] = 5
    a[0, 1, 2, 3] = NAN
    write_tensors(tmp_path, {"y": a}, {"y": b})
    with asking(tmp_path) as client:
        text = page(client, "y", rows=2, columns=3)
        links = [unescape(one) for one in re.findall(r'href="(/tensors\?[^"]*mark=[^"]*)"', text)]
        assert len(links) == 2 and "mark=0%2C1%2C2%2C3" in links[0]
        assert "i0=1&i1=2&" in links[1] and "rows=2&columns=3" in links[1]
        close = client.get(links[1]).text
        assert "showing rows 7 to 39 and columns 17 to 49" in close and "<circle" in close


def test_tensor_cell_shows_both_values(tmp_path):
    b = np.arange(12, dtype=np.float32).reshape(3, 4)
    a = b.copy()
    a[1, 2] = np.array([0x7FC01234], np.uint32).view(np.float32)[0]
    a[2, 3] = 12
    write_tensors(tmp_path, {"y": a}, {"y": b}, {"x": a})
    with asking(tmp_path) as client:

        def told(**query: Any) -> str:
            given = {"id": "run", "case": "model", "output": "y", **query}
            return str(client.get("/api/tensors/cell", params=given).json()["text"])

        nan = "[1, 2]: Board nan (bits 0x7fc01234), Reference 6, difference inf, tolerance 1.78e-05"
        assert told(row=1, column=2) == told(row=2, column=1, rows=1, columns=0) == nan
        wrong = "[2, 3]: Board 12, Reference 11, difference 1, 1048576 ULP, tolerance 2.43e-05"
        limit = 1e-5 + 1.3e-6 * 11
        assert told(row=2, column=3) == f"{wrong}, error ÷ tolerance {1 / limit:.3g}"
        assert told(row=0, column=0) == "[0, 0]: Board 0, Reference 0, equal, tolerance 1e-05"
        assert told(row=1, column=2, output="x", kind="inputs") == "[1, 2]: nan (bits 0x7fc01234)"
        given = {"id": "run", "case": "model", "row": 3, "column": 0}
        refused = client.get("/api/tensors/cell", params=given, headers={"accept": "application/json, */*"})
        assert (refused.status_code, refused.text) == (404, "cell 3, 0 does not exist")


def test_tensor_cell_summarizes_nan_and_infinite_elements(tmp_path):
    b = np.zeros((640, 640), np.float32)
    a = b.copy()
    a[0, 0], a[0, 1], a[1, 1] = NAN, -INF, 0.5
    write_tensors(tmp_path, {"y": a}, {"y": b}, {"x": a})
    with asking(tmp_path) as client:
        given = {"id": "run", "case": "model", "rows": 0, "columns": 1, "row": 0, "column": 0}
        told, alone = (
            str(client.get("/api/tensors/cell", params={**given, **one}).json()["text"])
            for one in ({"output": "y"}, {"output": "x", "kind": "inputs"})
        )
        shown = page(client, "y", rows=0, columns=1)
    assert "[0, 0]: Board nan" in told
    assert "1 of 4 are -infinite, but not in the reference; 1 of 4 are NaN, but not in the reference" in told
    assert told.endswith("worst finite difference: 0.5")
    assert alone.endswith("first of 2 x 2 elements; 1 of 4 are -infinite; 1 of 4 are NaN")
    assert "NaN, but not in the reference: 1 of 409600 elements<" in shown
    assert "worst finite difference 0.5" in shown


@pytest.mark.parametrize(("board", "reference"), [((2, 3), (0, 3)), ((0, 3), (2, 3)), ((4,), (4, 0))])
def test_tensor_page_shows_empty_side_of_different_shapes(tmp_path, board, reference):
    write_tensors(tmp_path, {"y": np.ones(board, np.float32)}, {"y": np.ones(reference, np.float32)})
    with asking(tmp_path) as client:
        text = page(client, "y", now="all")
        assert "Shape mismatch" in text
        assert ('id="map-value-0"' in text) == bool(np.prod(board)) and 'id="map-value-1"' not in text
        assert client.get("/share", params={"page": "/tensors?id=run&case=model&output=y"}).status_code == 200


def test_tensor_page_draws_different_shapes_separately(tmp_path):
    write_tensors(tmp_path, {"y": np.ones((3, 4), np.float32)}, {"y": np.ones((3, 5), np.float32)})
    with asking(tmp_path) as client:
        text = page(client, "y")
    assert "Shape mismatch: 3x4 float32 and 3x5 float32. The maps are separate." in text
    assert 'id="map-value-1"' in text and 'id="map-difference"' not in text


def test_tensor_page_reads_valid_and_rejects_damaged_files(tmp_path):
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    folder = write_tensors(tmp_path, {"y": a}, {"y": a})
    file = folder / "model" / "outputs" / "0.npy"
    with asking(tmp_path) as client:
        for good in (np.asfortranarray(a), a.astype(">f4")):
            np.save(file, good)
            assert found(page(client, "y"), "mismatches") == "0 of 12"
        for bad in (np.array([(1, 2)], "i4,i4"), np.array([b"x"]), np.array([1], "M8[s]"), np.array([{}], object)):
            np.save(file, bad, allow_pickle=True)
            assert client.get("/tensors?id=run&case=model").status_code == 404
        file.write_bytes(b"\x93NUMPY\x01\x00")
        assert "is not a readable .npy file" in client.get("/tensors?id=run&case=model").text
        file.unlink()
        assert "no such file" in client.get("/tensors?id=run&case=model").text


@pytest.mark.parametrize(
    "query",
    [
        "columns=2",
        "columns=x",
        "rows=0&columns=1&i0=99999999999",
        "columns=0&i1=9",
        "pool=x",
        "part=x",
        "by=x",
        "top=-1",
    ],
)
def test_tensor_page_rejects_invalid_query(tmp_path, query):
    a = np.ones((3, 4), np.float32)
    write_tensors(tmp_path, {"y": a}, {"y": a})
    with asking(tmp_path) as client:
        assert client.get(f"/tensors?id=run&case=model&{query}").status_code == 400


@pytest.mark.parametrize("mark", ["9,9", "x", "1", "1,1,1", "."])
def test_tensor_page_ignores_invalid_mark(tmp_path, mark):
    a = np.ones((3, 4), np.float32)
    write_tensors(tmp_path, {"y": a}, {"y": a})
    with asking(tmp_path) as client:
        assert "<circle" not in page(client, "y", mark=mark, top=2, left=9, height=99)


def test_tensor_page_rejects_files_outside_record(tmp_path):
    outside = tmp_path / "secret.npy"
    np.save(outside, np.ones(3))
    entry = {"name": "y", "dtype": "float64", "shape": [3], "file": "../../secret.npy"}
    write_run(tmp_path / "runs", "run", [{"outputs": [entry]}])
    with asking(tmp_path / "runs") as client:
        assert "No tensors stored" in client.get("/tensors?id=run&case=model").text


def test_tensor_page_reads_raw_bytes_with_selected_dtype(tmp_path):
    folder = write_suite(tmp_path, "suite", [{"id": "case", "folder": "cases/case", "outcome": "FAIL"}])
    (folder / "cases" / "case" / "inputs").mkdir(parents=True)
    save_npy(folder / "cases" / "case" / "inputs" / "0-x.npy", np.ones(3, ml_dtypes.float8_e5m2))
    with asking(tmp_path) as client:
        asked = client.get("/tensors?id=suite&case=case").text
        link = unescape(next(one for one in re.findall(r'href="([^"]+)"', asked) if one.endswith("float8_e5m2")))
        assert "3 float8_e5m2" in client.get(link).text
        assert "input <a" in client.get("/case?id=suite&case=case").text


def test_case_page_suggests_option_to_keep_tensors(tmp_path):
    write_suite(tmp_path, "suite", [{"id": "case", "repeat": "hil suite run @models --filter =case"}])
    with asking(tmp_path) as client:
        text = client.get("/case?id=suite&case=case").text
    assert "only stores tensors of cases that did not pass" in text and "--filter =case --keep-all" in text


@pytest.mark.parametrize(
    ("case", "present", "missing"),
    [
        ({"outcome": "PASS"}, "only stores tensors of cases that did not pass", "To store all tensors"),
        ({"outcome": "FAIL", "repeat": "hil suite run @models"}, "No tensors stored: the case ended", "--keep-all"),
        ({"outcome": "PASS", "repeat": "pytest x.onnx"}, "pytest x.onnx --hil-keep-all", " --keep-all"),
    ],
)
def test_case_page_without_tensors_names_reason(tmp_path, case, present, missing):
    write_suite(tmp_path, "suite", [{"id": "case", "repeat": "", **case}])
    with asking(tmp_path) as client:
        text = client.get("/case?id=suite&case=case").text
    assert present in text and missing not in text


def test_tensor_page_loads_large_tensors_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(view, "AT_ONCE", 10)
    a = np.arange(100, dtype=np.float32)
    write_tensors(tmp_path, {"y": a + np.eye(1, 100, 7, np.float32)[0]}, {"y": a})
    with asking(tmp_path) as client:
        text = page(client, "y")
        assert text.count('hx-trigger="load"') == 5 and "<img" not in text
        for part, within in {"values": "map-value-0", "errors": "map-difference", "ulps": "map-ulp"}.items():
            given = {"id": "run", "case": "model", "output": "y"}
            answer = client.get("/tensors", params=given, headers={"hx-target": part}).text
            assert answer.lstrip().startswith(f'<div id="{part}"') and within in answer
        assert page(client, "y").count('hx-trigger="load"') == 2
        assert 'hx-trigger="load"' not in page(client, "y", now="all")


def test_tensor_page_embeds_images_as_png(tmp_path):
    a = np.ones((3, 4), np.float32)
    write_tensors(tmp_path, {"y": a}, {"y": a})
    with asking(tmp_path) as client:
        text = page(client, "y")
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert pictures and all(base64.b64decode(one).startswith(b"\x89PNG") for one in pictures)
    assert re.search(r'alt="Difference: rows 0 to 2 and columns 0 to 3\. no element differs\."', text)


@pytest.mark.ci
def test_tensor_page_stays_below_memory_limit(tmp_path):
    b = np.random.default_rng(0).standard_normal((2500, 1000)).astype(np.float32)
    a = b + np.float32(1e-6)
    a[5, 5] = NAN
    write_tensors(tmp_path, {"y": a}, {"y": b})
    del a, b
    with asking(tmp_path) as client:
        tracemalloc.start()
        try:
            text = page(client, "y", now="all")
            assert tracemalloc.get_traced_memory()[1] < MAX_BYTES < 160 << 20
        finally:
            tracemalloc.stop()
    assert "map-difference" in text


def test_results_cache_shares_computation_and_evicts_at_limit():
    results = Results(100, 2)
    made: list[int] = []
    gate = threading.Barrier(4)

    def ask() -> None:
        gate.wait()
        results.get("key", lambda: (made.append(1), 60))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1] and results.bytes == 60
    results.get("other", lambda: ("other", 60))
    assert "key" not in results and "other" in results and results.bytes == 60


def test_results_cache_recomputes_after_failure():
    results = Results(100, 1)
    with pytest.raises(ZeroDivisionError):
        results.get("key", lambda: (1 // 0, 1))
    assert results.get("key", lambda: (json.dumps(1), 1)) == "1"


def test_quick_results_bypass_slow_results():
    results, over = Results(100, 1), threading.Event()
    makes: list[int] = []

    def long() -> tuple[str, int]:
        makes.append(1)
        assert over.wait(60)
        return "long", 1

    slow = [threading.Thread(target=results.get, args=(key, long), kwargs={"slow": True}) for key in ("a", "b")]
    for thread in slow:
        thread.start()
    eventually(lambda: makes)
    assert results.get("quick", lambda: ("quick", 1)) == "quick"
    assert makes == [1]
    over.set()
    for thread in slow:
        thread.join()
    assert makes == [1, 1]


def test_waiting_thread_computes_result_after_failure():
    results, made = Results(100, 2), []

    def until_two_ask() -> None:
        eventually(lambda: results._making["key"].asking == 2)

    def fail() -> tuple[str, int]:
        until_two_ask()
        raise ZeroDivisionError

    def make() -> tuple[str, int]:
        until_two_ask()
        made.append(1)
        return "made", 60

    def ask() -> None:
        with pytest.raises(ZeroDivisionError):
            results.get("key", fail)

    first = threading.Thread(target=ask)
    first.start()
    eventually(lambda: results._making)
    second = threading.Thread(target=results.get, args=("key", make))
    second.start()
    first.join()
    assert results.get("key", make) == "made"
    second.join()
    assert made == [1] and results.bytes == 60 and not results._making


def test_shown_provides_page_numbers_in_python(tmp_path):
    """Test the Python interface to the numbers of the page."""
    from hil.controller.web.tensors.query import TensorQuery
    from hil.controller.web.tensors.subjects import make_pair_subject

    a, b = np.ones((3, 4), np.float32), np.zeros((3, 4), np.float32)
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b)
    shown = TensorView.of(TensorQuery(), make_pair_subject(tmp_path / "a.npy", tmp_path / "b.npy"))
    assert shown.judgement().comparison.mismatches == 12
    assert [figure.name for figure in shown.errors()] == ["difference", "nonfinite"]


def test_shown_reloads_replaced_file(tmp_path):
    from hil.controller.web.tensors.query import TensorQuery
    from hil.controller.web.tensors.subjects import make_pair_subject

    def write(array: np.ndarray) -> TensorView:
        for name in ("a", "b"):
            np.save(tmp_path / "new.npy", array)
            (tmp_path / "new.npy").replace(tmp_path / f"{name}.npy")
        return TensorView.of(TensorQuery(), make_pair_subject(tmp_path / "a.npy", tmp_path / "b.npy"))

    before, after = write(np.ones((3, 4), np.float32)), write(np.ones((6, 2), np.float32))
    for shown, size in ((before, (3, 4)), (after, (6, 2)), (before, (3, 4))):
        assert [(one.rows, one.columns) for one in shown.values()] == [size] * 2
    (tmp_path / "a.npy").unlink()
    with pytest.raises(UsageError, match="no such file"):
        TensorView.of(TensorQuery(), after.subject)


def test_shown_rejects_file_during_write(tmp_path, monkeypatch):
    from hil.controller.web.tensors.query import TensorQuery
    from hil.controller.web.tensors.subjects import make_pair_subject

    np.save(tmp_path / "a.npy", np.ones(3))
    times = iter(range(1000))
    monkeypatch.setattr(view, "stamp_of", lambda path: next(times))
    with pytest.raises(UsageError, match="is being written"):
        TensorView.of(TensorQuery(), make_pair_subject(tmp_path / "a.npy", tmp_path / "a.npy"))


@pytest.mark.parametrize("recorded", [{}, {"name": 3, "tolerance": [], "mismatches": {}, "max_abs": "x", "reason": 4}])
def test_tensor_page_opens_incomplete_record(tmp_path, recorded):
    a = np.ones((3, 4), np.float32)
    folder = write_tensors(tmp_path, {"y": a}, {"y": a})
    record = json.loads((folder / "run.json").read_text())
    record["cases"][0]["verdicts"] = [{"outputs": [recorded]}]
    (folder / "run.json").write_text(json.dumps(record))
    with asking(tmp_path) as client:
        answer = client.get("/tensors?id=run&case=model")
        assert answer.status_code == 200 and found(answer.text, "mismatches") == "0 of 12"


def test_tensor_page_compares_output_with_each_reference(tmp_path):
    outputs = [{"name": "y", "dtype": "float32", "mismatches": 1, "elements": 3}]
    other = {"against": "another reference", "outcome": "PASS", "outputs": [{**outputs[0], "mismatches": 0}]}
    record = {"id": "case", "folder": "cases/case", "outcome": "FAIL", "outputs": outputs, "against": "a reference"}
    plain = {"plain_outputs": outputs, "plain_against": "the first"}
    folder = write_suite(tmp_path, "suite", [{**record, "other_references": [other], **plain}])
    a = np.arange(3, dtype=np.float32)
    for kind, values in (("outputs", a), ("references", a + 1), ("references-1", a), ("plain_references", a * 2)):
        (folder / "cases" / "case" / kind).mkdir(parents=True)
        save_npy(folder / "cases" / "case" / kind / "0-y.npy", values)
    with asking(tmp_path) as client:
        text = client.get("/tensors?id=suite&case=case").text
        assert found(text, "mismatches") == "3 of 3" and "1 of 3" in text
        links = [unescape(one) for one in re.findall(r'href="(/tensors\?[^"]*beside=[^"]*)"', text)]
        assert len(links) == 2
        for link, mismatches, who in ((links[0], "0 of 3", "another reference"), (links[1], "2 of 3", "the first")):
            text = client.get(link).text
            assert found(text, "mismatches") == mismatches and f"of {who}" in text


def test_tensor_page_suggests_command_to_keep_tensors(tmp_path):
    write_suite(tmp_path, "suite", [{"id": "case", "repeat": "hil suite run @models --filter =case"}])
    with asking(tmp_path) as client:
        answer = client.get("/tensors?id=suite&case=case&output=y")
    assert answer.status_code == 404 and "--filter =case --keep-all" in answer.text
