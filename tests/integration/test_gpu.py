"""Programs on a Vulkan device. CI uses Mesa's lavapipe, which computes on the CPU."""

from __future__ import annotations

import gzip
import json

import pytest
from support.models import DIGITS
from support.vulkan import needs_vulkan

pytestmark = [pytest.mark.slow, needs_vulkan]

DIGITS_MODEL = DIGITS / "digits_cnn.onnx"
# Sums rows. IREE adds the values of a row within a subgroup.
SUM = """func.func @sum(%a: tensor<16x64xf32>) -> tensor<16xf32> {
  %zero = arith.constant dense<0.0> : tensor<16xf32>
  %sum = linalg.reduce { arith.addf } ins(%a : tensor<16x64xf32>) outs(%zero : tensor<16xf32>) dimensions = [1]
  return %sum : tensor<16xf32>
}"""
GIVEN = ["--input", "16x64xf32=1", "--expected", "16xf32=64"]
ON_VULKAN = ["--board", "sim", "--runtime", "iree", "--device", "vulkan"]


@pytest.fixture
def summing(tmp_path):
    (tmp_path / "sum.mlir").write_text(SUM)
    return "sum.mlir"


def test_run_compiles_for_reported_device(hil, summing):
    ended = hil("run", summing, *ON_VULKAN, *GIVEN, "--iterations", 3, "--json")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.out
    assert any("subgroup_size_choices" in flag for flag in ended.case["artifact"]["flags"])
    (part,) = ended.case["provenance"]["placement"]
    assert part["device"] == "vulkan"


@pytest.mark.parametrize("target", ["adreno", "rdna3"])
def test_program_for_other_gpu_is_refused(hil, summing, target):
    ended = hil("run", summing, *ON_VULKAN, *GIVEN, f"--compile-flag=--iree-vulkan-target={target}", "--json")
    assert ended.case["outcome"] == "LOAD_ERROR", ended.out
    assert "was compiled for" in ended.case["reason"] and "subgroups of" in ended.case["reason"]
    assert "hil then compiles for the device that the board reports" in ended.case["error"]["hint"]


def test_program_for_vulkan_is_refused_by_cpu(hil, summing):
    assert hil("compile", summing, "--device", "vulkan", "-o", "sum.vmfb").code == 0
    ended = hil("run", "sum.vmfb", *GIVEN, "--json")
    assert ended.case["outcome"] == "LOAD_ERROR", ended.out
    assert "was compiled for vulkan (vulkan-subgroup8), not for" in ended.case["reason"]
    assert "--device vulkan" in ended.case["error"]["hint"]


def test_software_device_is_labelled(hil, summing):
    ended = hil("board", "devices", "sim", "--json")
    vulkan = next(one for one in json.loads(ended.out)["devices"] if one["device"].startswith("vulkan"))
    run = hil("run", summing, *ON_VULKAN, *GIVEN)
    assert ("a software device" in run.out) == vulkan["software"]
    assert ("not a GPU time" in run.out) == vulkan["software"]


def test_profile_has_track_of_device(hil, summing, tmp_path):
    ended = hil("run", summing, *ON_VULKAN, *GIVEN, "--iterations", 3, "--profile", "prof", "--json")
    assert ended.code == 0, ended.out
    head = json.loads((tmp_path / "prof" / "profile.json").read_text())
    assert head["device"].startswith("vulkan")
    assert head["rows"] >= 3
    trace = gzip.decompress((tmp_path / "prof" / "trace.pftrace.gz").read_bytes())
    assert f"device: {head['device']}".encode() in trace
    profiled = next(call for call in head["calls"] if call["kind"] == "profiled")
    rows = (tmp_path / "prof" / "ops.csv").read_text().splitlines()
    column = rows[0].split(",").index("start_ns")
    starts = [int(row.split('"')[0].split(",")[column]) for row in rows[1:]]
    begin, end = (profiled["board"][name] for name in ("start_ns", "end_ns"))
    assert all(begin <= start <= end for start in starts), "the device's times are on the board's clock"


def test_suite_and_bundle_run_on_vulkan(hil):
    ended = hil("suite", "run", DIGITS_MODEL, "--no-layers", "--flow", "iree_vulkan", "--out", "suite")
    assert ended.code == 0, ended.out
    assert hil("bundle", "create", DIGITS_MODEL, "--device", "vulkan", "--cases", 1, "-o", "d.hilb").code == 0
    assert hil("bundle", "run", "d.hilb", "--device", "vulkan").code == 0
