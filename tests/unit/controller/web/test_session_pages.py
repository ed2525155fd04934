"""Test the pages of sessions and cases: they show all stored data, escaped."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus, urlencode

import numpy as np
import pytest
from starlette.testclient import TestClient
from support.web import asking, write_record, write_run, write_suite

from hil.controller.web import tables
from hil.controller.web.readers import RECORDS
from hil.controller.web.session import session_view
from hil.controller.web.session.session_view import format_comparison
from hil.controller.workloads.traces.comparing import compare_traces, judge_trace
from hil.controller.workloads.traces.stored import TraceComparison, make_title
from hil.controller.workloads.traces.trace import COMPARISON, ModuleCall, Trace

BEFORE = "\u202e<img src=x onerror=alert(1)>\n\x00\ud800"


def get(client: TestClient, path: str, **query: Any) -> str:
    answer = client.get(f"{path}?{urlencode(query)}")
    assert answer.status_code == 200, (path, query, answer.text[-800:])
    return answer.text


def text_of(page: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


def layer(name: str, alone: dict[str, Any] | None, within: dict[str, Any] | None) -> dict[str, Any]:
    return {"name": name, "op": "Conv", "depth": 3, "nodes": ["n"], "isolated": alone, "cumulative": within}


def test_bisect_page_shows_both_results_per_layer(tmp_path: Path) -> None:
    right = {"outcome": "PASS", "max_abs": 0.25, "sqnr_db": "inf"}
    wrong = {"outcome": "FAIL", "max_abs": 7.5, "sqnr_db": 12.25, "reason": "far off"}
    document = {"model": "m.onnx", "layers": [layer("a", right, right), layer("b", right, wrong)], "whole": wrong}
    write_record(tmp_path / "b" / "bisect.json", {**document, "verdict": "the first layer that is wrong: b"})
    with asking(tmp_path) as client:
        text = text_of(get(client, "/session", id="b"))
        assert "the first layer that is wrong: b" in text
        assert "3 a Conv PASS 0.25 inf PASS 0.25 inf 3 b Conv PASS 0.25 inf FAIL 7.5 12.2 far off" in text
        assert "unmodified model FAIL 7.5 12.2 far off" in text
        assert "far off" in text_of(get(client, "/case", id="b", case="whole"))


def test_study_page_shows_column_per_stage(tmp_path: Path) -> None:
    stages = [
        {"name": "compile", "outcome": "pass", "seconds": 1.5},
        {"name": "run", "outcome": "fail", "seconds": 0.01},
    ]
    row = {"experiment": "fc", "toolchain": "iree", "outcome": "RUN_ERROR", "stages": stages, "message": "no"}
    worst = {"max_abs": 0.125, "of": "w", "step": 2}
    write_record(tmp_path / "s" / "study.json", {"rows": [{**row, "steps": 3, "worst": worst, "detail": "its words"}]})
    with asking(tmp_path) as client:
        text = text_of(get(client, "/session", id="s"))
        assert "fc iree RUN_ERROR 1.5 s fail 10 ms 3 0.125 in w, step 2 no" in text
        assert "its words" in text_of(get(client, "/case", id="s", case="fc iree"))


def test_bench_page_shows_faster_side_with_interval(tmp_path: Path) -> None:
    times = {"p50_ns": 2e6, "iterations": 40, "median": {"low": 1.9e6, "high": 2.1e6}}
    grade = {"grade": "F", "reasons": ["throttled"]}
    side = {"name": "A-m", "model": "x/m.onnx", "outcome": "PASS", "times": times, "grade": grade}
    interval = {"low": 1.05, "high": 1.11, "level": 0.99}
    compared = {"ratio": 1.08, "interval": interval, "verdict": "slower"}
    write_record(tmp_path / "b" / "bench.json", {"sides": [{**side, "label": "A"}], "comparison": compared})
    write_record(tmp_path / "b" / "run.json", {"cases": [{"name": "A-m", "artifact": {"compiler": "iree 3"}}]})
    with asking(tmp_path) as client:
        text = text_of(get(client, "/session", id="b"))
        assert "A m PASS 2 ms 1.9 ms to 2.1 ms 40 F" in text
        assert "B takes 1.08 times as long as A (99% interval 1.05 to 1.11): slower" in text
        case = text_of(get(client, "/case", id="b", case="m"))
        assert "Compiler iree 3" in case and "Grade F: throttled" in case
    assert format_comparison({"verdict": "faster", "ratio": "x"}) == "faster"


def test_matrix_page_links_targets_in_both_directions(tmp_path: Path) -> None:
    targets = [{"name": "a"}, {"name": "b"}, {"name": "c", "error": {"outcome": "BOARD_REFUSED", "message": "no"}}]
    write_record(tmp_path / "m" / "matrix.json", {"title": "net", "targets": targets})
    write_suite(tmp_path / "m", "a", [{"id": "one"}, {"id": "two"}])
    write_suite(tmp_path / "m", "b", [{"id": "one"}, {"id": "two", "outcome": "FAIL", "message": "far"}])
    with asking(tmp_path) as client:
        page = get(client, "/session", id="m")
        text = text_of(page)
        assert "one differs PASS PASS BOARD_REFUSED no two differs PASS FAIL far BOARD_REFUSED no" in text
        assert 'href="/case?id=m%2Fb&amp;case=two"' in page
        assert 'href="/session?id=m%2Fa"' in page
        assert 'href="/session?id=m"' in get(client, "/session", id="m/a")
        assert "net on a, b, c" in text_of(get(client, "/"))


def test_matrix_page_sorts_differences_first(tmp_path: Path) -> None:
    write_record(tmp_path / "m" / "matrix.json", {"title": "net", "targets": [{"name": "a"}, {"name": "b"}]})
    write_suite(tmp_path / "m", "a", [{"id": "one"}, {"id": "two"}, {"id": "three"}], finished=None)
    write_suite(tmp_path / "m", "b", [{"id": "one"}, {"id": "two", "outcome": "FAIL", "message": "far"}])
    with asking(tmp_path) as client:
        assert "two differs PASS FAIL far three differs PASS absent one PASS PASS" in text_of(
            get(client, "/session", id="m")
        )


def test_matrix_page_limits_rows_to_shared_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_RESULTS", 4)
    write_record(tmp_path / "m" / "matrix.json", {"title": "net", "targets": [{"name": "a"}, {"name": "b"}]})
    write_suite(tmp_path / "m", "a", [{"id": one} for one in ("one", "two", "three", "four")])
    write_suite(tmp_path / "m", "b", [{"id": one} for one in ("four", "three", "two", "one")])
    with asking(tmp_path) as client:
        text = text_of(get(client, "/session", id="m"))
    assert "four PASS PASS one PASS PASS" in text and "differs" not in text and "absent" not in text
    assert "2 more rows not shown" in text


def test_session_page_lists_unfinished_cases_of_long_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_view, "_ASKED", 3)
    ids = ["z", "y", "x", *"abcdef"]
    write_suite(tmp_path, "s", [{"id": one} for one in ("a", "b", "c", "x", "z")], ids=ids, finished=None)
    with asking(tmp_path) as client:
        text = text_of(get(client, "/session", id="s"))
    assert "4 cases have no result yet, or the session was interrupted: y and 3 more" in text


def test_session_page_shows_missing_cases_and_resume_command(tmp_path: Path) -> None:
    head = {"finished": None, "interrupted": True, "command": "hil suite run --resume s", "ids": ["a", "b", "c"]}
    write_suite(tmp_path, "s", [{"id": "a"}], **head)
    cases = [{"name": "x", "path": "x.onnx"}, {"name": "y", "path": "y.onnx", "outcome": None}]
    request = {"models": ["x.onnx", "y.onnx", "z.onnx"]}
    write_run(tmp_path, "r", cases, finished=False, exit_code=130, request=request)
    with asking(tmp_path) as client:
        text = text_of(get(client, "/session", id="s"))
        assert "2 cases have no result yet, or the session was interrupted: b, c" in text
        assert "hil suite run --resume s" in text
        text = text_of(get(client, "/session", id="r"))
        assert "2 cases have no result yet, or the session was interrupted: y, z.onnx" in text
        assert f"hil run --resume {tmp_path}/r" in text


def test_case_page_shows_origin_references_and_files(tmp_path: Path) -> None:
    other = {"against": "numpy", "outcome": "FAIL", "outputs": [{"name": "y", "max_abs": 3.0}]}
    case = {
        "id": "a",
        "board": "pi",
        "hw_type": "rpi5",
        "runtime": "vendor",
        "placement": [
            {"device": "npu", "nodes": 4},
            {
                "device": "cpu",
                "nodes": 3,
                "elsewhere": True,
                "reasons": [{"text": "no kernel", "nodes": 2, "names": ["a", "b"]}],
            },
        ],
        "other_references": [other],
        "disagreement": "numpy and ort on y",
        "attempts": [{"why": "board lost", "board": "pi2", "outcome": "BOARD_LOST", "message": "gone"}],
        "expectation": {"outcome": "FAIL", "reason": "known"},
        "folder": "cases/a",
        "left": {"ir": "ir/a", "run profile": "../elsewhere"},
    }
    folder = write_suite(
        tmp_path, "s", [case], versions={"onnx": "1.23"}, board_info={"pi": {"machine": {"arch": "arm"}}}
    )
    for name in (
        "cases/a/difference.png",
        "cases/a/outputs/0-y.npy",
        "ir/a/1.mlir",
        "cases/a/.begun",
        "logs/000/x.log",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("module {}")
    with asking(tmp_path) as client:
        page = get(client, "/case", id="s", case="a")
        text = text_of(page)
        for told in (
            *("Board pi", "Hardware rpi5", "Machine arm", "Ran on npu (4 nodes), cpu (3 nodes)", "Versions onnx 1.23"),
            "Why elsewhere 2 nodes on cpu: no kernel (a, b); 1 node on cpu: reason not reported by vendor",
            *(
                "The references disagree: numpy and ort on y",
                "FAIL Compared with numpy",
                "board lost on pi2: BOARD_LOST gone",
            ),
            *("reason known", "ir: 1.mlir", "outside the session directory"),
        ):
            assert told in text, told
        assert ".begun" not in page and "elsewhere" in page
        assert get(client, "/file", id="s", file="ir/a/1.mlir") == "module {}"
        picture = client.get("/file?id=s&file=cases%2Fa%2Fdifference.png")
        assert picture.headers["content-type"] == "image/png"
        tensor = client.get("/file?id=s&file=cases%2Fa%2Foutputs%2F0-y.npy")
        assert tensor.headers["content-disposition"].startswith("attachment")
        text = text_of(get(client, "/session", id="s"))
        assert "logs/000/x.log" in text and "Files results.jsonl suite.json" in text
        assert get(client, "/log", id="s", file="logs/000/x.log") == "module {}"


@pytest.mark.parametrize("name", ["../out", "link", ".lock", "", "folder", "pipe", "a\x00b", "x" * 5000, "/etc/passwd"])
def test_file_routes_reject_files_outside_session(tmp_path: Path, name: str) -> None:
    folder = write_suite(tmp_path / "runs", "s", [{"id": "a"}])
    (tmp_path / "runs" / "out").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "runs" / "out")
    (folder / ".lock").write_text("secret")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    with asking(tmp_path / "runs") as client:
        for path in ("/file", "/log"):
            answer = client.get(f"{path}?{urlencode({'id': 's', 'file': name})}")
            assert answer.status_code == 404 and "secret" not in answer.text


@pytest.mark.ci
@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("value", [None, 1e999, float("nan"), [3, None, {}], {"a": {"b": []}}, BEFORE])
def test_session_pages_survive_invalid_values(tmp_path: Path, record: str, value: object) -> None:
    names = (
        "cases sides layers rows targets origin request board versions ids title suite flow comparison whole calls "
        "module_name backend name command left_out notes verdict created finished outcome"
    )
    case_names = (
        "path stage reason error model artifact timings device provenance verdicts references unanswered profiles op "
        "isolated cumulative outputs stages worst message placement times label outputs against other_references "
        "attempts expectation left folder plain_outputs worker_log cached params hint detail"
    )
    case = {
        **dict.fromkeys(case_names.split(), value),
        "name": "c",
        "id": "c",
        "experiment": "c",
        "toolchain": "",
        "outcome": "",
    }
    whole = dict.fromkeys(names.split(), value)
    lists = {name: [case, value] for name in ("cases", "sides", "layers", "rows", "targets")}
    for number, document in enumerate((whole, {**whole, **lists})):
        write_record(tmp_path / f"s{number}" / record, document)
        (tmp_path / f"s{number}" / "results.jsonl").write_text(json.dumps(case) + "\n")
    write_record(tmp_path / "s1" / "run.json", {"cases": [case, value]})
    with asking(tmp_path) as client:
        page = get(client, "/")
        for number in range(2):
            listed = f"id=s{number}" in page
            # A trace without a valid list of calls is not a session.
            assert listed or (record, number) == ("trace.json", 0)
            if listed:
                for name in set(
                    re.findall(r"/case\?id=s\d&amp;case=([^\"&]*)", get(client, "/session", id=f"s{number}"))
                ):
                    found = get(client, "/case", id=f"s{number}", case=unquote_plus(unescape(name)))
                    assert "<img src=x" not in found and "\u202e" not in text_of(found)
        assert "<img src=x" not in page and "\u202e" not in text_of(page)


def test_trace_page_shows_outcomes_of_comparison(tmp_path: Path) -> None:
    call = ModuleCall("predict", (np.float32([1]),), (np.float32([2]),))
    wrong = replace(call, outputs=(np.float32([2.5]),))
    reference = Trace("Module", "tf", "trace", ran_by="TensorFlow 2", calls=[call, call])
    made = Trace("Module", "iree_vmvx", "trace", ran_by="IREE 3", calls=[call, wrong])
    folder = made.save(tmp_path / "t")
    with asking(tmp_path) as client:
        text = text_of(get(client, "/session", id="t"))
        assert "call_0_predict" in text and "not run" not in text and "ran by IREE 3" in text
        assert "Method predict" in text_of(get(client, "/case", id="t", case="call_0_predict"))
    calls = tuple(compare_traces(reference, made))
    TraceComparison(make_title(made, reference), *judge_trace(calls), calls).save(folder)
    kept = (folder / COMPARISON).read_text()
    with asking(tmp_path) as client:
        text = text_of(get(client, "/session", id="t"))
        assert "Module.trace fail" in text and "1 FAIL 1 PASS" in text
        assert "Module/trace on iree_vmvx against tf: FAIL: call 1 (predict): output 0" in text
        text = text_of(get(client, "/case", id="t", case="call_1_predict"))
        assert "call_1_predict FAIL" in text and "Outputs compared with tf" in text and "1 of 1 0.5" in text
        assert "PASS" in text_of(get(client, "/case", id="t", case="call_0_predict"))
    # A new trace ignores a comparison of the previous trace, even if its file was copied here.
    made.save(folder)
    (folder / COMPARISON).write_text(kept)
    with asking(tmp_path) as client:
        for page in (get(client, "/session", id="t"), get(client, "/case", id="t", case="call_1_predict")):
            assert "FAIL" not in page and "against tf" not in page


def test_trace_tensors_use_names_of_comparison(tmp_path: Path) -> None:
    given = {"b": np.float32([1]), "a": [np.float32([2, 2]), None]}
    call = ModuleCall("f", (), (given,), state={"v": np.float32([3])}, assigned=("v",))
    wrong = replace(call, outputs=({**given, "b": np.float32([9])},))
    reference, made = (Trace("M", name, "t", calls=[one]) for name, one in (("tf", call), ("sim", wrong)))
    calls = tuple(compare_traces(reference, made))
    TraceComparison("n", *judge_trace(calls), calls).save(made.save(tmp_path / "t"))
    with asking(tmp_path) as client:
        page = get(client, "/case", id="t", case="call_0_f")
        links = [unescape(one) for one in re.findall(r'href="(/tensors[?][^"]*)"', page)]
        shown = [text_of(client.get(link).text) for link in links]
    assert sum("0.b 1 float32" in text for text in shown) == sum("0.a.0 2 float32" in text for text in shown) == 1
    assert sum("variable v 1 float32" in text for text in shown) == 1 and "1 of 1 8" in text_of(page)


def test_session_check_lists_deleted_sessions(tmp_path: Path) -> None:
    write_run(tmp_path, "one")
    with asking(tmp_path) as client:
        for query, gone in (("", ""), ("id=one", ""), ("id=two", "two"), ("id=one&root=7", ""), ("s=one", "")):
            assert (f"'{gone}'" in client.get(f"/api/there?{query}").json()["gone"]) == bool(gone), query
        assert "'two'" in client.get("/api/there?s=one&s=two").json()["gone"]


def test_session_list_names_directories(tmp_path: Path) -> None:
    with asking(tmp_path) as client:
        assert f"0 sessions in {tmp_path.resolve()}" in text_of(get(client, "/"))


def test_session_list_unifies_model_names_and_links_cases(tmp_path):
    write_record(tmp_path / "found" / "bisect.json", {"schema": 1, "model": "nets/net.onnx", "layers": []})
    write_suite(tmp_path, "suite", [{"id": "net_full_model", "model": "net"}])
    with asking(tmp_path) as client:
        page = client.get("/?model=net").text
        assert "2 sessions" in page and 'value="net.onnx"' not in client.get("/").text
        assert '<a href="/search?q=net_full">search cases</a>' in client.get("/?q=net_full").text
        assert "net_full_model" in client.get("/history?q=net_full").text
