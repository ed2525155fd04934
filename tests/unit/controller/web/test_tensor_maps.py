"""Test the maps of tensor pages: scales, axes, tiles, files and links to failing outputs."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from html import unescape
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

import numpy as np
import pytest
from support.web import asking, write_suite
from support.web_tensors import write_tensors

from hil.controller.analysis.tensors.pictures import COLOURS, make_palette
from hil.controller.analysis.tensors.planes import choose_plane
from hil.controller.web.files.cached import Results
from hil.controller.web.tensors import view
from hil.controller.web.tensors.drawing.axes import make_column_marks, make_row_marks, name_axes
from hil.core.npy import save_npy
from hil.errors import UsageError

NAN = float("nan")


def ask(client: Any, path: str = "/tensors", **query: Any) -> Any:
    answer = client.get(path, params={"id": "run", "case": "model", **query})
    assert answer.status_code == 200, answer.text
    return answer


def figure(text: str, name: str) -> str:
    match = re.search(rf'<figure class="map" id="map-{name}">(.*?)</figure>', text, re.DOTALL)
    assert match, text[:2000]
    return unescape(match[1])


def read_png(data: bytes) -> tuple[np.ndarray, dict[str, str]]:
    """Return the colors of a PNG with a palette, (rows, columns, 3), and its texts."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, chunks, texts = 8, {}, {}
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + size]
        assert zlib.crc32(kind + body) == struct.unpack_from(">I", data, at + 8 + size)[0]
        if kind == b"iTXt":
            key, _, rest = body.partition(b"\0")
            texts[key.decode()] = rest[4:].decode()
        chunks[kind] = body
        at += 12 + size
    width, height = struct.unpack_from(">II", chunks[b"IHDR"])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    return np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(256, 3)[lines[:, 1:]], texts


def picture(text: str, name: str) -> np.ndarray:
    match = re.search(r'class="plot".*?src="data:image/png;base64,([^"]+)"', figure(text, name), re.DOTALL)
    assert match
    return read_png(base64.b64decode(match[1]))[0]


@pytest.fixture
def images(tmp_path):
    """A run with NCHW tensors: channel 3 is wrong, and one element is an outlier."""
    b = np.random.default_rng(0).standard_normal((2, 40, 6, 8)).astype(np.float32)
    a = b + np.float32(1e-7)
    a[0, 3, 1:3, 2:5] += 1
    a[1, 7, 2, 3] = 1e9
    write_tensors(tmp_path, {"conv": a}, {"conv": b})
    return tmp_path, a, b


def test_tensor_page_states_default_scale_and_why(images):
    root, a, _ = images
    with asking(root) as client:
        slices = {"rows": 2, "columns": 3, "i0": 1, "i1": 7}
        outlier = figure(ask(client, **slices).text, "value-0")
        plain = figure(ask(client, rows=2, columns=3).text, "value-0")
        linear = figure(ask(client, scale="linear", **slices).text, "value-0")
    assert "Scale: robust: 2nd to 98th percentile of the cells, because outliers would blank a linear map" in outlier
    # Two tensors share the scale: each has 48 cells.
    both = np.concatenate([a[1, 7].ravel(), images[2][1, 7].ravel()])
    high, low = np.percentile(both, 98, method="lower"), np.percentile(both, 2, method="higher")
    assert f">{high:.3g}<" in outlier and f">{low:.3g}<" in outlier
    assert (np.count_nonzero(both < low), np.count_nonzero(both > high)) == (2, 1)
    assert "; 2 cells below, 1 cell above<" in outlier
    assert "Scale: linear<" in plain and "Scale: linear<" in linear and ">1000000000<" in linear


def test_tensor_page_colors_error_by_tolerance(tmp_path):
    b = np.array([[1.0, 1.0, 1.0, 1.0]], np.float32)
    a = np.array([[1.0, 1.5, 1.25, NAN]], np.float32)
    write_tensors(tmp_path, {"y": a}, {"y": b})
    with asking(tmp_path) as client:
        text = ask(client, scale="tolerance", rtol=0, atol=0.25, rows=0, columns=1).text
        found = picture(text, "difference")
    assert "Error ÷ tolerance" in figure(text, "difference") and "(rtol 0, atol 0.25)" in figure(text, "difference")
    assert "2 of 4 cells out of tolerance" in figure(text, "difference")
    palette = np.frombuffer(make_palette("limit"), np.uint8).reshape(256, 3)
    # Twice the tolerance, on a scale from 0.01 to 100, and exactly the tolerance.
    twice = int((np.log10(2) + 2) / 4 * 239)
    assert found[0, 1].tolist() == palette[twice].tolist() and found[0, 2].tolist() == palette[119].tolist()
    assert bytes(found[0, 0]).hex() == "d9d9d9" and bytes(found[0, 3]).hex() == COLOURS[6]
    assert "NaN, but not in the reference: 1 of 4 elements" in figure(text, "difference")


def test_tensor_page_shows_integers_as_integers(tmp_path):
    b = np.arange(6, dtype=np.int64).reshape(2, 3) * 1_234_567
    write_tensors(tmp_path, {"y": b + 5, "z": b > 3}, {"y": b, "z": b > 3})
    with asking(tmp_path) as client:
        text = figure(ask(client, output="y").text, "value-0")
        difference = figure(ask(client, output="y", scale="linear").text, "difference")
        flags = figure(ask(client, output="z", scale="robust").text, "value-0")
    assert ">0<" in text and ">6172840<" in text and "from 5 to 6172840" in text
    assert ">0<" in difference and ">5<" in difference
    assert ">0<" in flags and ">1<" in flags and "Scale: linear" in flags


def test_axes_have_names_and_index_marks(images):
    root, _, _ = images
    with asking(root) as client:
        text = figure(ask(client, rows=2, columns=3, layout="NCHW").text, "value-0")
        plain = figure(ask(client).text, "value-0")
        refused = client.get("/tensors?id=run&case=model&layout=CHW")
    assert "axis 2 (H) ↓" in text and "axis 3 (W) →" in text
    # 8 columns in 320 pixels: a mark in the middle of each second column.
    marks = re.search(r'<svg class="marks columns".*?</svg>', text, re.DOTALL)[0]
    assert re.findall(r'<text x="([\d.]+)" y="14"[^>]*>(\d+)<', marks) == [
        (str(40.0 * at + 20), str(at)) for at in range(0, 8, 2)
    ]
    assert "axes 0 to 2, flattened ↓" in plain and "axis 3 →" in plain
    assert refused.status_code == 400 and "layout CHW has 3 axes, but the tensor has 4" in refused.text


@pytest.mark.parametrize(
    ("first", "count", "labels"),
    [
        (0, 10, [str(one) for one in range(10)]),
        (0, 1000, ["0", "100", "200", "300", "400", "500", "600", "700", "800", "900"]),
        (1_234_560, 30, ["+0", "+5", "+10", "+15", "+20", "+25"]),
        (0, 3_000_000, ["0", "500k", "1M", "1.5M", "2M", "2.5M"]),
    ],
)
def test_axis_marks_are_round_and_in_the_middle_of_their_element(first, count, labels):
    found = make_row_marks("axis 0", first, count, 320)
    assert [text for _, text in found.marks] == labels
    step = found.marks[1][0] - found.marks[0][0]
    assert step >= 20 and all(0 <= place <= 320 for place, _ in found.marks)
    assert found.label == ("axis 0, from 1234560" if first else "axis 0")
    assert make_column_marks("", 0, 0, 10).marks == ()


def test_axes_of_every_rank_have_names():
    assert name_axes(choose_plane(())) == ("", "")
    assert name_axes(choose_plane((5,))) == ("", "axis 0")
    assert name_axes(choose_plane((1000,))) == ("row of 32 elements", "element in the row")
    assert name_axes(choose_plane((3, 5))) == ("axis 0", "axis 1")
    assert name_axes(choose_plane((2, 3, 4, 5), None, 1)) == ("", "axis 1")
    with pytest.raises(UsageError, match="NHWC has 4 axes"):
        name_axes(choose_plane((2, 3)), "NHWC")


def tile_images(text: str) -> list[tuple[str, np.ndarray, str]]:
    part = unescape(re.search(r'<ol class="tiles".*?</ol>', text, re.DOTALL)[0])
    found = re.findall(r'<a href="([^"]+)"><span>([^<]+)</span><img src="data:image/png;base64,([^"]+)"', part)
    return [(caption, read_png(base64.b64decode(data))[0], link) for link, caption, data in found]


def test_tiles_show_each_channel_with_a_common_scale(images):
    root, a, b = images
    with asking(root) as client:
        text = ask(client, tiles=1, scale="linear").text
        second = tile_images(ask(client, tiles=1, tile_page=2).text)
        values = tile_images(ask(client, tiles=1, tile_of="second", scale="linear").text)
        close = ask(client, **parse_one(tile_images(text)[3][2])).text
    tiles = tile_images(text)
    assert [caption.partition(":")[0] for caption, _, _ in tiles] == [str(one) for one in range(24)]
    assert "Page 1 of 2" in text and [one[0].partition(":")[0] for one in second] == [str(one) for one in range(24, 40)]
    errors = np.abs(a[0, :24].astype(np.float64) - b[0, :24])
    assert tiles[3][0] == f"3: max {errors[3].max():.3g}"
    palette = np.frombuffer(make_palette("inferno"), np.uint8).reshape(256, 3)
    places = np.minimum((errors / errors.max() * 239).astype(int), 239)
    for number, (_, found, _) in enumerate(tiles):
        wanted = np.where((errors[number] == 0)[..., None], [0xD9] * 3, palette[places[number]])
        assert np.abs(found.astype(int) - wanted).max() <= 6
    low, high = float(b[0, :24].min()), float(b[0, :24].max())
    wanted = np.frombuffer(make_palette("viridis"), np.uint8).reshape(256, 3)[
        ((b[0, 5] - low) / (high - low) * 239).astype(int)
    ]
    assert np.abs(values[5][1].astype(int) - wanted).max() <= 6
    assert "6 rows and 8 columns" in close and 'name="i1" min="0" max="39" value="3"' in close


def test_tiles_of_a_shown_axis_use_the_other_axes(images):
    with asking(images[0]) as client:
        tiles = tile_images(ask(client, tiles=2, rows=2, columns=3).text)
    assert len(tiles) == 6 and tiles[0][1].shape == (40, 8, 3)
    assert parse_one(tiles[4][2]) | {"rows": "1", "columns": "3", "i2": "4"} == parse_one(tiles[4][2])


def parse_one(link: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(link).query).items() if name not in ("id", "case")}


def test_layout_links_choose_rows_columns_and_channels(images):
    root, _, _ = images
    with asking(root) as client:
        text = ask(client).text
    links = [parse_one(one) for one in re.findall(r'href="([^"]+)"[^>]*>Channels of N', unescape(text))]
    chosen = [tuple(one[name] for name in ("layout", "rows", "columns", "tiles")) for one in links]
    assert chosen == [("NCHW", "2", "3", "1"), ("NHWC", "1", "2", "3")]


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"tiles": 9}, "the tensor has 4 axes"),
        ({"tiles": "x"}, "the tensor has 4 axes"),
        ({"scale": "x"}, "invalid scale"),
        ({"tile_of": "x"}, "invalid tile_of"),
        ({"tiles": 1, "i0": 7}, "invalid index 7 on axis 0"),
    ],
)
def test_tensor_page_rejects_invalid_tiles_and_scales(images, query, told):
    with asking(images[0]) as client:
        answer = client.get("/tensors", params={"id": "run", "case": "model", **query})
    assert answer.status_code == 400 and told in unescape(answer.text)


def test_map_files_contain_view_and_facts(images):
    root, a, b = images
    query = {"rows": 2, "columns": 3, "i1": 3, "scale": "tolerance", "figure": "difference"}
    with asking(root) as client:
        svg = ask(client, "/tensors/map.svg", **query)
        png = ask(client, "/tensors/map.png", **query)
        missing = client.get("/tensors/map.svg?id=run&case=model&figure=x")
    names = [one.headers["content-disposition"] for one in (svg, png)]
    assert names == [f'attachment; filename="model-conv-difference-tolerance.{kind}"' for kind in ("svg", "png")]
    root_element = ElementTree.fromstring(svg.content)
    texts = [one.text for one in root_element.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "model: conv: Error ÷ tolerance"
    assert {"axis 2 ↓", "axis 3 →", "slice [0, 3, :, :], rows 0 to 5, columns 0 to 7"} <= set(texts)
    out = np.abs(a[0, 3].astype(np.float64) - b[0, 3]) > 1e-5 + 1.3e-6 * np.abs(b[0, 3])
    assert any(f"{np.count_nonzero(out)} of 48 cells out of tolerance" in text for text in texts)
    colours, told = read_png(png.content)
    assert colours.shape[:2] == (240 + 12 + 10, 320)
    red = colours[20:240:40, 20:320:40, 0] > colours[20:240:40, 20:320:40, 2]
    assert np.array_equal(red, out)
    assert told["Title"] == texts[0] and told["Range"] == "0.0001 to 10000" and "1 is the limit" in told["Scale"]
    assert missing.status_code == 404 and "map 'x' not found" in unescape(missing.text)


@pytest.mark.parametrize("at_once", [view.AT_ONCE, 10])
def test_many_elements_of_tiles_do_not_delay_pictures(images, monkeypatch, at_once):
    limits = {}
    get = Results.get

    def record(results, key, make, *, slow=False):
        limits[key[0]] = slow
        return get(results, key, make, slow=slow)

    monkeypatch.setattr(Results, "get", record)
    monkeypatch.setattr(view, "AT_ONCE", at_once)
    with asking(images[0]) as client:
        ask(client, tiles=1, now="all")
    assert (limits["tiles"], limits["values"]) == (at_once == 10, False)


def test_map_file_of_hostile_name_is_valid_xml(tmp_path):
    name = "<script>\ufffe\uffff\x1b&"
    values = {name: np.ones(3, np.float32)}
    write_tensors(tmp_path, values, values)
    with asking(tmp_path) as client:
        answer = ask(client, "/tensors/map.svg", figure="value-0")
    texts = [one.text for one in ElementTree.fromstring(answer.content).iter("{http://www.w3.org/2000/svg}text")]
    assert "<script>\ufffd\ufffd\\x1b&" in texts[0]
    assert re.fullmatch(r'attachment; filename="[\w.-]+"', answer.headers["content-disposition"])


def test_tile_files_contain_all_tiles_of_the_page(images):
    with asking(images[0]) as client:
        svg = ask(client, "/tensors/map.svg", tiles=1, figure="tiles")
        colours, told = read_png(ask(client, "/tensors/map.png", tiles=1, figure="tiles").content)
    element = ElementTree.fromstring(svg.content)
    assert len(list(element.iter("{http://www.w3.org/2000/svg}image"))) == 24 + 1
    assert "axis 1, indices 0 to 23 of 40" in told["Description"] and colours.shape[1] > 500
    assert 'filename="model-conv-tiles-automatic.svg"' in svg.headers["content-disposition"]


@pytest.mark.parametrize("name", ["evil\x1b</text><script>", "ü" * 200])
def test_map_file_escapes_names(tmp_path, name):
    a = np.ones((3, 4), np.float32)
    write_tensors(tmp_path, {name: a}, {name: a})
    with asking(tmp_path) as client:
        svg = ask(client, "/tensors/map.svg", output=name, figure="value-0")
    assert not list(ElementTree.fromstring(svg.content).iter("{http://www.w3.org/2000/svg}script"))
    file = re.fullmatch(r'attachment; filename="([\w.-]+)"', svg.headers["content-disposition"])
    assert file and file[1].endswith("-value-0-automatic.svg") and file[1].isascii()


@pytest.mark.parametrize("array", [np.float32(3), np.zeros(5, bool), np.arange(3) * 1j, np.ones((1, 1), np.float16)])
def test_maps_of_small_and_unusual_tensors_have_files(tmp_path, array):
    array = np.asarray(array)
    write_tensors(tmp_path, {"y": array}, {"y": array})
    with asking(tmp_path) as client:
        for scale in ("automatic", "linear", "robust", "symlog", "log", "tolerance"):
            text = ask(client, scale=scale).text
            for one in re.findall(r'id="map-([\w-]+)"', text):
                ElementTree.fromstring(ask(client, "/tensors/map.svg", scale=scale, figure=one).content)
                read_png(ask(client, "/tensors/map.png", scale=scale, figure=one).content)


def failing_suite(root):
    """A suite whose cases pass, fail in two of three outputs, lose the board, pass, and fail in one output."""
    wrong = {"a": ["y", "w"], "b": ["y"]}
    cases = []
    for name in ("p", "a", "lost", "q", "b"):
        outputs = [{"name": one, "passed": one not in wrong.get(name, ())} for one in ("x", "y", "w")]
        outcome = "FAIL" if name in wrong else "BOARD_LOST" if name == "lost" else "PASS"
        cases.append({"id": name, "folder": f"cases/{name}", "outcome": outcome, "outputs": outputs})
    folder = write_suite(root, "suite", cases)
    for name in ("p", "a", "q", "b"):
        for kind in ("outputs", "references"):
            (folder / "cases" / name / kind).mkdir(parents=True)
            for number, one in enumerate(("x", "y", "w")):
                save_npy(folder / "cases" / name / kind / f"{number}-{one}.npy", np.ones((3, 4), np.float32))


def test_failing_links_visit_every_failing_output_in_order(tmp_path):
    failing_suite(tmp_path)
    with asking(tmp_path) as client:

        def step(case: str, output: str, step: str = "next") -> tuple[str, str]:
            query = {"id": "suite", "case": case, "kind": "outputs", "output": output, "step": step, "scale": "robust"}
            answer = client.get("/tensors/failing", params=query, follow_redirects=False)
            assert answer.status_code == 303, answer.text
            found = parse_qs(urlsplit(answer.headers["location"]).query)
            assert found["scale"] == ["robust"]
            assert client.get(answer.headers["location"]).status_code == 200
            return found["case"][0], found["output"][0]

        assert [step("p", "x"), step("a", "y"), step("a", "w"), step("b", "y")] == [
            *(("a", "y"), ("a", "w"), ("b", "y")),
            ("a", "y"),
        ]
        assert [step("b", "y", "previous"), step("a", "w", "previous"), step("a", "y", "previous")] == [
            *(("a", "w"), ("a", "y")),
            ("b", "y"),
        ]
        assert step("a", "x") == ("a", "y")
        text = client.get("/tensors?id=suite&case=a&output=w").text
        passing = client.get("/tensors?id=suite&case=p&output=x").text
        assert client.get("/tensors/failing?id=suite&case=a&step=x").status_code == 400
    assert "Failing case 1 of 3, failing output 2 of 2" in text and "3 failing cases" in passing


def test_failing_link_reports_suite_without_tensors(tmp_path):
    write_suite(tmp_path, "suite", [{"id": "lost", "outcome": "BOARD_LOST"}])
    with asking(tmp_path) as client:
        answer = client.get("/tensors/failing?id=suite&case=lost")
    assert answer.status_code == 404 and "has stored tensors" in answer.text


def test_page_of_huge_tensor_reads_only_its_window(tmp_path, monkeypatch):
    """Two sparse files of 2 GB: the page of a window and its files do not read the rest."""
    small = np.zeros((4, 4), np.float32)
    folder = write_tensors(tmp_path, {"y": small + 1}, {"y": small})
    for kind in ("outputs", "reference-0"):
        file = folder / "model" / kind / "0.npy"
        np.lib.format.open_memmap(file, "w+", np.float32, (1 << 14, 1 << 15)).flush()
    read = []
    from hil.controller.analysis.tensors import planes

    fetch = planes.Plane.read

    def count(self, array, part):
        for top, left, piece in fetch(self, array, part):
            read.append(piece.size)
            yield top, left, piece

    monkeypatch.setattr(planes.Plane, "read", count)
    window = {"top": 5000, "left": 9000, "height": 33, "width": 33, "scale": "tolerance", "rows": 0, "columns": 1}
    with asking(tmp_path) as client:
        text = ask(client, **window).text
        svg = ask(client, "/tensors/map.svg", figure="difference", **window)
        cell = ask(client, "/api/tensors/cell", row=1, column=1, **window).json()
    assert 'id="map-difference"' in text and text.count('hx-trigger="load"') == 2
    assert cell["text"].startswith("[5001, 9001]: Board 0, Reference 0, equal, tolerance")
    assert svg.content.startswith(b"<svg") and sum(read) < 40_000
