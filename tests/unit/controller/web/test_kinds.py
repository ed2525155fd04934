"""Test every kind of stored directory: publish it, then check its page, cases and command."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from support.waiting import eventually
from support.web import serving

from hil.controller.web.publish.publisher import Publisher, read_folder

TOKEN = "the token"
_CASE = {"name": "net", "outcome": "PASS", "path": "net.onnx"}
_RUN = {"schema": 1, "created": 1.7e9, "board": {"name": "sim"}, "cases": [_CASE], "finished": True, "exit_code": 0}
_LAYER = {"name": "conv", "op": "Conv", "depth": 1, "isolated": {"outcome": "FAIL", "reason": "y differs"}}
_ROW = {"experiment": "mnist", "toolchain": "iree", "outcome": "PASS", "stages": []}
_SIDE = {"name": "net", "label": "A", "model": "net.onnx", "outcome": "PASS", "times": {"p50_ns": 1.5e6}}
_SUITE = {"schema": 1, "suite": "models", "flow": "iree", "ids": ["net"], "started": 1.7e9, "finished": 1.7e9 + 9}
_TRACE = {"schema": 1, "module_name": "Net", "backend": "sim", "name": "main", "calls": 1, "created": 1.7e9}
_GATE = {"schema": 1, "id": "g", "folder": "", "created": 1.7e9, "finished": True, "history": "h", "baseline": "main"}
_GATE |= {"commit": "", "min_effect": 0.02, "budget_s": 9, "fail_on": [], "unmeasured": [], "verdicts": []}
_GATE |= {"exit_code": 0}
# Kind: the files of its directory, the command, the cases and a text of its page.
KINDS: Mapping[str, tuple[dict[str, Any], str, list[str], str]] = {
    "run": (
        {"run.json": _RUN | {"request": {"models": ["net.onnx"]}}, "net/logs/worker.log": "a line"},
        "hil run net.onnx",
        ["net"],
        "net",
    ),
    "bundle": ({"run.json": _RUN | {"command": "hil bundle run net.hilb"}}, "hil bundle run net.hilb", ["net"], "net"),
    "trace run": ({"run.json": _RUN | {"command": "hil trace run kept"}}, "hil trace run kept", ["net"], "net"),
    "suite": (
        {
            "suite.json": _SUITE | {"command": "pytest tests/models"},
            "results.jsonl": {"id": "net", "model": "net", "outcome": "FAIL", "message": "y differs"},
        },
        "pytest tests/models",
        ["net"],
        "y differs",
    ),
    "bench": (
        {"run.json": _RUN | {"command": "hil bench net.onnx"}, "bench.json": {"schema": 1, "sides": [_SIDE]}},
        "hil bench net.onnx",
        ["net"],
        "1.5",
    ),
    "bisect": (
        {"bisect.json": {"schema": 1, "model": "net.onnx", "layers": [_LAYER], "command": "hil bisect net.onnx"}},
        "hil bisect net.onnx",
        ["conv"],
        "y differs",
    ),
    "study": (
        {"study.json": {"schema": 1, "rows": [_ROW], "command": "hil study run mnist", "finished": True}},
        "hil study run mnist",
        ["mnist"],
        "mnist",
    ),
    "gate": (
        {"run.json": _RUN | {"command": "hil gate --baseline main"}, "gate.json": _GATE},
        "hil gate --baseline main",
        [],
        "against main",
    ),
    "matrix": (
        {
            "matrix.json": {"schema": 1, "title": "both", "targets": [{"name": "pi"}], "again": "hil run --targets t"},
            "pi/run.json": _RUN,
        },
        "hil run --targets t",
        ["net"],
        "Cases on targets",
    ),
    "trace": (
        {
            "trace.json": _TRACE | {"command": "pytest test_net.py::NetTest::test_main"},
            "call_0/call.json": {"method": "main"},
            "log.txt": "a line",
        },
        "pytest test_net.py::NetTest::test_main",
        ["call_0_main"],
        "Net.main",
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("there"), token=TOKEN) as address:
        yield address


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_publish_shows_every_kind_of_directory(kind: str, server: str, tmp_path: Path) -> None:
    files, command, cases, shown = KINDS[kind]
    folder = tmp_path / f"a {kind}"
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data if isinstance(data, str) else json.dumps(data) + "\n")
    with Publisher(server, TOKEN) as there:
        published = there.publish(read_folder(folder))
        assert (published.new, published.files) == (True, len(files))
        assert there.publish(read_folder(folder)).sent_files == 0

    def page(address: str) -> str:
        try:
            with urllib.request.urlopen(urllib.request.Request(address, headers={"accept": "text/html"})) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError:
            return ""

    def whole() -> str:
        text = unescape(page(published.url))
        return text if all(case in text for case in cases) else ""

    text = eventually(whole)
    assert command in text and shown in text
    links = {unescape(one) for one in re.findall(r'href="(/case[?][^"]*)"', text)}
    assert len(links) >= len(cases)
    for link in links:
        assert shown in (opened := unescape(page(server + link))) or cases[0] in opened
    files_shown = re.findall(r'href="(/file[?][^"]*)"', text)
    assert files_shown
    for link in files_shown:
        assert page(server + link)
