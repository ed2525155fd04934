"""Special files and odd names in input: hil rejects the files and completes suites."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import save_model

FLOAT = TensorProto.FLOAT
# The longest possible file names, of 1-byte and of 4-byte characters.
LONG = b"l" * 240, ("\N{MATHEMATICAL BOLD CAPITAL A}" * 60).encode()


def odd_files(folder: Path) -> dict[str, Path]:
    """Create special files by kind."""
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(folder)  # keeps the socket path short
        made.bind("socket")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "folder").mkdir()
    return {name: folder / name for name in ("fifo", "socket", "zero", "folder")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fifo", "zero"])
def test_cli_rejects_special_files_quickly(hil, doubling, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    odd = odd_files(tmp_path)[kind]
    for suffix in (".npy", ".npz", ".pb", ".onnx", ".hilb", ".bpte", ".toml", ".bin", ".flagfile"):
        (tmp_path / f"odd{suffix}").symlink_to(odd)
    sim = ("--runtime-hw-type", "sim")
    for words in (
        ("run", doubling, *sim, "--input", "odd.npy"),
        ("run", doubling, *sim, "--input", "x=odd.npz:x"),
        ("run", doubling, *sim, "--input", "x=odd.pb"),
        ("run", doubling, *sim, "--input", "4xf32=@odd.bin"),
        ("run", doubling, *sim, "--expected", "odd.npy"),
        ("run", "odd.onnx", *sim),
        ("run", doubling, "--board", "./odd.toml"),
        ("compare", "odd.npy", "odd.npy"),
        ("bundle", "run", "odd.hilb", *sim),
        ("bundle", "info", "odd.hilb"),
        ("bundle", "import", "odd.bpte", "--from", "bpte", "-o", "made.hilb"),
        ("bundle", "import", "odd.flagfile", "--from", "flagfile", "-o", "made.hilb"),
        ("suite", "run", "odd.onnx", *sim),
    ):
        began = time.monotonic()
        ended = hil(*words)
        assert ended.code in (2, 3), (words, ended.out, ended.err)
        assert time.monotonic() - began < 30, words


def model(path: Path) -> None:
    weight = numpy_helper.from_array(np.ones(4, np.float32), "w")
    save_model(path, [helper.make_node("Add", ["x", "w"], ["y"])], [("x", FLOAT, [4])], [("y", FLOAT, [4])], [weight])


def test_suite_writes_reports_despite_odd_names_and_files(hil, tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    model(folder / "good.onnx")
    model(folder / "bad.onnx")
    for name in (*LONG, b"not\xffutf8", b"title\x1b]0;owned\x07", b"two\nlines"):
        shutil.copy(folder / "good.onnx", os.fsencode(folder) + b"/" + name + b".onnx")
    os.mkfifo(folder / "bad.inputs.npz")
    os.mkfifo(folder / "pipe.onnx")
    ended = hil("suite", "run", folder, "--runtime-hw-type", "sim", "--out", "out", "--no-layers")
    assert ended.code == 3, (ended.out, ended.err)
    records = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    outcomes = sorted(record["outcome"] for record in records)
    assert outcomes == ["IMPORT_ERROR"] * 2 + ["PASS"] * 6, (outcomes, ended.out)
    for report in ("junit.xml", "report.html", "results.csv", "summary.md"):
        assert (tmp_path / "out" / report).stat().st_size > 100
    # The record has the full file name; the case ID is truncated.
    (cut,) = (record for record in records if record["model"] == LONG[0].decode())
    assert cut["id"].startswith("lll") and len(cut["id"]) == 160


@pytest.mark.parametrize("name", [*LONG, b"not\xffutf8"], ids=["long", "wide", "bytes"])
@pytest.mark.parametrize("runtime", ["iree", "onnxruntime"])
def test_run_accepts_any_model_name(hil, simulator, tmp_path, name, runtime):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name + b".onnx"))
    model(tmp_path / "model.onnx")
    shutil.move(tmp_path / "model.onnx", path)
    assert hil("run", path, "--board", simulator, "--runtime", runtime, "--json").case["outcome"] == "PASS"


def test_run_stores_tensors_under_safe_names(hil, simulator, tmp_path):
    x, y = "\N{MATHEMATICAL BOLD CAPITAL A}" * 300, "../../../owned"
    save_model(tmp_path / "m.onnx", [helper.make_node("Abs", [x], [y])], [(x, FLOAT, [4])], [(y, FLOAT, [4])])
    case = hil("run", "m.onnx", "--board", simulator, "--json").case
    assert (case["outcome"], case["inputs"][0]["name"], case["outputs"][0]["name"]) == ("PASS", x, y)


@pytest.mark.slow
def test_golden_import_rejects_links_out_of_directory(hil, doubling, tmp_path):
    assert hil("bundle", "create", doubling, "--runtime-hw-type", "sim", "-o", "a.hilb").code == 0
    assert hil("bundle", "export", "a.hilb", "golden", "--to", "golden").code == 0
    (tensor,) = tmp_path.glob("golden/*/*/input_0.npy")
    (case,) = tmp_path.glob("golden/*/0-*")
    program = next((tmp_path / "golden" / "program").iterdir())
    for number, place in enumerate((tensor, case, program, tmp_path / "golden" / "golden.json")):
        kept = tmp_path / f"kept-{number}"
        place.rename(kept)
        place.symlink_to(kept)
        ended = hil("bundle", "import", "golden", "--from", "golden", "-o", f"{number}.hilb")
        assert ended.code == 2 and "points outside" in ended.err, (place, ended.err)
        assert not (tmp_path / f"{number}.hilb").exists()
        place.unlink()
        kept.rename(place)
    assert hil("bundle", "import", "golden", "--from", "golden", "-o", "good.hilb").code == 0


def test_external_data_rejects_links_out_of_directory(hil, simulator, tmp_path):
    folder = tmp_path / "with data"
    (folder / "test_data_set_0").mkdir(parents=True)
    model(folder / "model.onnx")
    value = numpy_helper.from_array(np.zeros(4, np.float32)).SerializeToString()
    (tmp_path / "secret.pb").write_bytes(value)
    (folder / "test_data_set_0" / "input_0.pb").symlink_to("../../secret.pb")
    (folder / "test_data_set_0" / "output_0.pb").write_bytes(value)
    ended = hil("bundle", "import", folder, "--from", "onnx", "-o", "a.hilb")
    assert ended.code == 2 and "points outside" in ended.err
    weights = tmp_path / "weights"
    weights.mkdir()
    model(weights / "m.onnx")
    onnx.save(
        onnx.load(weights / "m.onnx"), weights / "m.onnx", save_as_external_data=True, location="w", size_threshold=0
    )
    (weights / "w").rename(tmp_path / "w")
    (weights / "w").symlink_to("../w")
    ended = hil("run", weights / "m.onnx", "--board", simulator, "--json")
    assert ended.code == 3 and "points outside" in ended.case["reason"], ended.out
