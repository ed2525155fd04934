"""The graph page in Chromium, compared with the stored record."""

from __future__ import annotations

import json
import math

import onnx
import pytest
from onnx import TensorProto, helper
from support.browser import NAMES, Page, find_browser
from support.layer_models import residual_cnn
from support.waiting import eventually
from support.web import serving, write_record
from support.web_scopes import write_scoped_bisection

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(not BROWSER, reason=f"no browser on PATH: {', '.join(NAMES)}")

# The page's colors, from correct to wrong, and the errors of a bisection of residual_cnn.
STOPS = ((0xEE, 0xF3, 0xC7), (0xF6, 0xB3, 0x52), (0xD1, 0x49, 0x5B), (0x6A, 0x1B, 0x4D))
ERRORS = {"stem": 1e-6, "stem_relu": 0.0, "block/conv1": 3e-5, "block/relu1": 1e-4, "block/add": 1e-2, "head": 2e-3}
WRONG = ("block/add", "head")
# Failing nodes of the bisection with name scopes.
FIRST, LAST = "/net/block4/layer2/Add", "/net/block9/layer5/Relu"


def layer(name, error, wrong):
    output = {"name": f"{name} out", "passed": not wrong, "max_abs": error, "sqnr_db": 80.0, "reason": "off"}
    found = {"outcome": "FAIL" if wrong else "PASS", "reason": "off" if wrong else "", "outputs": [output]}
    return {"name": f"L_{name}", "op": "?", "nodes": [name], "depth": 0, "isolated": found, "cumulative": None}


def bisection(root, name, errors, wrong=WRONG, model="net.onnx"):
    layers = [layer(node, error, node in wrong) for node, error in errors.items()]
    write_record(
        root / name / "bisect.json", {"schema": 1, "model": model, "board": f"board of {name}", "layers": layers}
    )


def large(path, count):
    """A chain where every fifth node adds the output of five nodes earlier."""
    names = ["x", *(f"t{number}" for number in range(count))]
    nodes = [
        helper.make_node("Add", [names[at], names[at - 4]], [names[at + 1]], f"n{at}")
        if at % 5 == 4
        else helper.make_node("Relu", [names[at]], [names[at + 1]], f"n{at}")
        for at in range(count)
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", names[-1])]
    graph = helper.make_graph(nodes, "large", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    root = tmp_path_factory.mktemp("stored")
    onnx.save(residual_cnn(), root / "net.onnx")
    bisection(root, "first", ERRORS)
    bisection(root, "second", {**ERRORS, "stem": 1.0}, wrong=("stem",))
    large(root / "large.onnx", 5000)
    bisection(root, "large", {f"n{at}": 1e-6 * at for at in range(5000)}, wrong=("n4000",), model="large.onnx")
    write_scoped_bisection(root, {FIRST: 0.5, LAST: 3e-6})
    with serving(root) as found:
        yield found


@pytest.fixture(scope="module")
def page():
    with Page(str(BROWSER)) as page:
        yield page


@pytest.fixture(autouse=True)
def nothing_went_wrong(page):
    page.resize(1280, 900)
    yield
    assert page.troubles == []


def opened(page, address, query):
    page.open(f"{address}/graph?{query}")
    page.wait("document.getElementById('graph').dataset.drawn === 'yes'")


def place_of(page, name, pane=0):
    """Return where a node is drawn: x and y in its canvas, and the scale."""
    return page.run(f"document.getElementById('graph').nodeAt({pane}, {json.dumps(name)})")


def colour_of(page, name, pane=0):
    """Return the pixel near a node's left edge, which has no text, inside the border of a selected node."""
    x, y, scale = place_of(page, name, pane)
    x -= 65 * scale
    return page.run(
        f"[...document.querySelectorAll('canvas')[{pane}].getContext('2d')"
        f".getImageData({x} * devicePixelRatio, {y} * devicePixelRatio, 1, 1).data].slice(0, 3)"
    )


def expected(error, errors):
    """Return the color of an error among all errors of a page, by its logarithm. Recomputed here."""
    positive = [one for one in errors if one > 0]
    low, high = math.log(min(positive)), math.log(max(positive))
    level = (math.log(error) - low) / (high - low) * 3 if error > 0 else 0.0
    first = min(int(level), 2)
    return [round(a + (b - a) * (level - first)) for a, b in zip(STOPS[first], STOPS[first + 1], strict=True)]


def close(found, wanted):
    return all(abs(a - b) <= 2 for a, b in zip(found, wanted, strict=True))


def key(page, name):
    for kind in ("keyDown", "keyUp"):
        page.call(
            "Input.dispatchKeyEvent", type=kind, key=name, text=name if kind == "keyDown" and len(name) == 1 else ""
        )


def mouse(page, kind, x, y, pane=0):
    box = page.run(f"(box => [box.x, box.y])(document.querySelectorAll('canvas')[{pane}].getBoundingClientRect())")
    page.call("Input.dispatchMouseEvent", type=kind, x=box[0] + x, y=box[1] + y, button="left", buttons=1, clickCount=1)


def test_node_color_matches_stored_error(page, address):
    opened(page, address, "id=first")
    for name, error in ERRORS.items():
        eventually(lambda name=name, error=error: close(colour_of(page, name), expected(error, ERRORS.values())), name)
    # No layer covers this node: it has the page background.
    assert colour_of(page, "flatten") == [255, 255, 255]
    swatches = page.run(
        "Object.fromEntries([...document.querySelectorAll('#nodes tbody tr')].map(row => [row.dataset.name,"
        " getComputedStyle(row.querySelector('.swatch')).backgroundColor]))"
    )
    for name, error in ERRORS.items():
        found = [int(part) for part in swatches[name].removeprefix("rgb(").removesuffix(")").split(",")]
        assert close(found, expected(error, ERRORS.values()))


def test_node_click_shows_details_and_links(page, address):
    opened(page, address, "id=first")
    x, y, _ = place_of(page, "block/add")
    page.run("document.querySelector('canvas').scrollIntoView()")
    mouse(page, "mousePressed", x, y)
    mouse(page, "mouseReleased", x, y)
    page.wait("document.querySelector('#node h2')?.textContent === 'block/add'")
    told = page.texts("#node")[0]
    assert "0.01" in told and "FAIL" in told and "off" in told
    links = page.run("[...document.querySelectorAll('#node a')].map(one => one.getAttribute('href'))")
    assert "/case?id=first&case=L_block%2Fadd" in links
    assert "/tensors?id=first&case=L_block%2Fadd&output=block%2Fadd+out" in links
    assert "node=block%2Fadd" in page.run("location.search")


def test_keys_select_failing_nodes(page, address):
    opened(page, address, "id=first")
    chosen = [page.run("document.getElementById('graph-status').textContent.split(':')[0]")]
    for name in ("n", "n", "p"):
        key(page, name)
        chosen.append(page.run("document.getElementById('graph-status').textContent.split(':')[0]"))
    # The model's nodes in file order. The last wraps to the first.
    assert chosen == ["block/add", "head", "block/add", "head"]


def test_search_finds_node_by_part_of_name(page, address):
    opened(page, address, "id=first")
    page.click("#find-node")
    page.type("relu")
    page.press("Enter")
    assert page.texts("#graph-status")[0].startswith("stem_relu: Relu")
    page.press("Enter")
    assert page.texts("#graph-status")[0].startswith("block/relu1: Relu")


def test_two_graphs_pan_zoom_and_select_together(page, address):
    opened(page, address, "id=first&id2=0:second")
    both = [*ERRORS.values(), 1.0]
    eventually(lambda: close(colour_of(page, "stem", 1), expected(1.0, both)), "the second board's colour")
    assert close(colour_of(page, "stem", 0), expected(1e-6, both))
    page.click("button[data-do=in]")
    eventually(lambda: place_of(page, "stem") == place_of(page, "stem", 1), "one place after zooming")
    before = place_of(page, "stem")
    page.run("document.querySelector('canvas').scrollIntoView()")
    mouse(page, "mousePressed", 30, 30)
    mouse(page, "mouseMoved", 80, 110)
    mouse(page, "mouseReleased", 80, 110)
    eventually(lambda: place_of(page, "stem")[:2] == pytest.approx([before[0] + 50, before[1] + 80]), "moved")
    assert place_of(page, "stem") == pytest.approx(place_of(page, "stem", 1))
    key(page, "n")
    page.wait("document.querySelectorAll('#node .sides > div').length === 2")
    assert [text.partition("\n")[0] for text in page.texts("#node .sides > div")] == [
        "net.onnx · ONNX · board of first · first",
        "net.onnx · ONNX · board of second · second",
    ]


def test_large_graph_lists_nodes_by_page(page, address):
    opened(page, address, "id=large")
    assert page.texts("#nodes tbody a.node")[0] == "n4000"
    assert len(page.texts("#nodes tbody tr")) == 100
    key(page, "n")
    eventually(lambda: close(colour_of(page, "n4000"), expected(4e-3, [1e-6 * at for at in range(5000)])), "its colour")
    assert page.run("document.getElementById('graph-status').textContent").startswith("n4000")
    # The browser computed no layout.
    assert not any("graph-worker" in one for one in page.requests[-8:])


def test_graph_page_fits_narrow_window(page, address):
    page.resize(390, 800)
    opened(page, address, "id=first&id2=0:second&node=stem")
    assert page.run("document.documentElement.scrollWidth") <= 390
    tops = page.run("[...document.querySelectorAll('canvas')].map(one => one.getBoundingClientRect().top)")
    assert tops[1] > tops[0] + 200


def status(page):
    return page.run("document.getElementById('graph-status').textContent")


def test_graph_opens_centred_on_first_failing_node(page, address):
    opened(page, address, "id=scoped")
    assert status(page).startswith(f"{FIRST}: Relu 250000") and page.texts("#node h2") == [FIRST]
    x, y, _ = place_of(page, FIRST)
    size = page.run("(one => [one.clientWidth, one.clientHeight])(document.querySelector('canvas'))")
    assert [x, y] == pytest.approx([size[0] / 2, size[1] / 2])
    # The address stays the address of the page, so that a link does not select the node.
    assert "node=" not in page.run("location.search")
    # The color of the node is that of its error divided by the tolerance, beyond the end of the scale.
    eventually(lambda: close(colour_of(page, FIRST), (0x7A, 0x0C, 0x0C)), "the colour of the limit scale")


def test_keys_open_and_close_scopes(page, address):
    opened(page, address, "id=scoped&open=none")
    group = "net/block9/"
    assert place_of(page, LAST) == place_of(page, group), "a node in a closed scope is at the place of its scope"
    page.click("button[data-do=next]")
    page.wait(f"document.getElementById('graph-status').textContent.startsWith('{FIRST}')")
    key(page, "n")
    page.wait(f"document.getElementById('graph-status').textContent.startsWith('{LAST}: Relu 1.5')")
    assert "open=" in page.run("location.search") and place_of(page, LAST) != place_of(page, "net/block9/layer4/")
    key(page, "x")
    page.wait("document.getElementById('graph-status').textContent.startsWith('net/block9/layer5/: 3 nodes 1 failing')")
    page.wait("document.querySelector('#node dd')?.textContent === '3 nodes, 1 failing'")
    key(page, "x")
    page.wait("document.getElementById('graph-status').textContent.startsWith('/net/block9/layer5/MatMul')")
    there = page.run("location.href")
    page.open(there)
    page.wait("document.getElementById('graph').dataset.drawn === 'yes'")
    assert status(page).startswith("/net/block9/layer5/MatMul: Relu")


@pytest.mark.slow
def test_second_click_opens_scope(page, address):
    opened(page, address, "id=scoped&open=none")
    page.click("button[data-do=fit]")
    x, y, _ = place_of(page, "net/block2/")
    page.run("document.querySelector('canvas').scrollIntoView()")
    for _ in range(2):
        mouse(page, "mousePressed", x, y)
        mouse(page, "mouseReleased", x, y)
    page.wait("document.getElementById('graph-status').textContent.startsWith('net/block2/layer0/')")


@pytest.mark.slow
def test_search_opens_scope_of_match(page, address):
    opened(page, address, "id=scoped&open=none")
    page.click("#find-node")
    page.type("block6/layer3/rel")
    page.press("Enter")
    page.wait("document.getElementById('graph-status').textContent.startsWith('/net/block6/layer3/Relu')")


def test_node_links_to_its_tensor(page, address):
    opened(page, address, "id=scoped")
    links = page.run("[...document.querySelectorAll('#node a')].map(one => one.getAttribute('href'))")
    assert (
        f"/tensors?id=scoped&case={'L' + FIRST}&output=t103".replace("/net/", "%2Fnet%2F").replace(
            "block4/layer2/Add", "block4%2Flayer2%2FAdd"
        )
        in links
    )
