"""Programs on a Vulkan device. CI uses Mesa's lavapipe, which computes on the CPU."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.models import DIGITS
from support.sshd import running_sshd
from support.traces import read_slices
from support.vulkan import needs_vulkan

import hil as hil_library
from hil.core.results import Outcome
from hil.testing import ModelFile, compare_backends, uniform

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
    slices = read_slices(tmp_path / "prof" / "trace.pftrace.gz")
    assert "operations" not in slices
    dispatches = slices[f"device: {head['device']}"]
    assert len(dispatches) == head["rows"]
    assert all(start < end for spans in slices.values() for _, start, end in spans)
    ordered = sorted((start, end) for _, start, end in dispatches)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered)), "the dispatches overlap"
    # The trace has the host's clock. The profiled run contains the dispatches, except for the error of the clock.
    ((_, first, last),) = [one for one in slices["transfers"] if one[0] == "profiled run"]
    error = head["clock"]["error_ns"]
    assert first - error <= ordered[0][0] and ordered[-1][1] <= last + error
    profiled = next(call for call in head["calls"] if call["kind"] == "profiled")
    rows = (tmp_path / "prof" / "ops.csv").read_text().splitlines()
    column = rows[0].split(",").index("start_ns")
    starts = [int(row.split('"')[0].split(",")[column]) for row in rows[1:]]
    begin, end = (profiled["board"][name] for name in ("start_ns", "end_ns"))
    assert all(begin <= start <= end for start in starts), "the device's times are on the board's clock"


def test_trace_runs_on_vulkan(hil, tmp_path):
    class Digits:
        predict = ModelFile(str(DIGITS_MODEL))

    def predicted(module):
        module.predict(uniform([1, 1, 8, 8]))

    backends = "iree_llvmcpu,iree_vulkan,iree_cuda"
    results = compare_backends(predicted, Digits, target_backends=backends, artifacts_dir=tmp_path / "traces")
    outcomes = {result.backend_id: result.outcome for result in results}
    assert outcomes == {"iree_llvmcpu": "PASS", "iree_vulkan": "PASS", "iree_cuda": outcomes["iree_cuda"]}
    if outcomes["iree_cuda"] == "SKIP":
        (why,) = [" ".join(result.lines()) for result in results if result.backend_id == "iree_cuda"]
        assert "has no device 'cuda'" in why and "devices found: local-task" in why
    place = tmp_path / "traces" / "Digits"
    # The flag file names the device, so hil and IREE's tools run the program there.
    flags = place / "iree_vulkan" / "traces" / "predicted" / "flagfile"
    assert "--device=vulkan" in flags.read_text()
    ended = hil("bench", "--flagfile", flags, "--iterations", 3, "--json")
    assert ended.code == 0, ended.out
    (part,) = ended.document["sides"][0]["placement"]
    assert part["device"] == "vulkan"
    stored = place / "iree_llvmcpu" / "traces" / "predicted"
    ended = hil("trace", "run", stored, "--board", "sim", "--device", "vulkan", "--json")
    assert ended.code == 0, ended.out
    assert [one["provenance"]["placement"][0]["device"] for one in ended.document["cases"]] == ["vulkan"]


def test_library_runs_on_selected_device():
    with hil_library.connect("sim") as board:
        before = board.config
        found = hil_library.run(DIGITS_MODEL, board, runtime="iree", device="vulkan")
        missing = hil_library.run(DIGITS_MODEL, board, runtime="iree", device="vulkan://radeon")
        assert board.config == before
    assert found and found.result is not None
    assert [part["device"] for part in found.result.provenance["placement"]] == ["vulkan"]
    assert missing.outcome is Outcome.BOARD_UNFIT and missing.artifact is None


def test_dispatches_run_on_vulkan(hil, summing):
    ended = hil("layers", summing, "--dispatches", "--board", "sim", "--device", "vulkan", "--out", "found", "--json")
    assert ended.code == 0, ended.out
    assert [one["finding"]["outcome"] for one in ended.document["dispatches"]] == ["PASS"]
    assert "subgroup_size_choices" in str(ended.document["flags"])


@pytest.fixture
def two_devices(tmp_path, environment):
    """Install lavapipe twice, as two devices with the same path."""
    manifest = next(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"), None)
    if manifest is None:
        pytest.skip("lavapipe's manifest is not in /usr/share/vulkan/icd.d")
    found = json.loads(manifest.read_text())
    library = str(shutil.copy(found["ICD"]["library_path"], tmp_path / "libvulkan_second.so"))
    second = tmp_path / "second.json"
    second.write_text(json.dumps({**found, "ICD": {**found["ICD"], "library_path": library}}))
    environment["VK_ICD_FILENAMES"] = f"{manifest}:{second}"


def test_devices_with_equal_paths_have_numbers(hil, summing, two_devices):
    listed = [one["device"] for one in json.loads(hil("board", "devices", "sim", "--json").out)["devices"]]
    assert [one for one in listed if one.startswith("vulkan")] == ["vulkan://0", "vulkan://1"]
    on_second = ["--board", "sim", "--runtime", "iree", "--device", "vulkan://1", *GIVEN, "--json"]
    ended = hil("run", summing, *on_second)
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.out
    ended = hil("run", summing, "--board", "sim", "--device", "vulkan://llvmpipe", *GIVEN)
    assert ended.code == 2 and "selects vulkan://0 and vulkan://1" in ended.err


def test_board_without_driver_has_no_vulkan_device(hil, summing, environment):
    environment["VK_ICD_FILENAMES"] = "/nonexistent"
    ended = hil("run", summing, *ON_VULKAN, *GIVEN, "--json")
    assert (ended.code, ended.case["outcome"]) == (4, "BOARD_UNFIT"), ended.out
    assert ended.case["reason"] == "board 'sim' has no device 'vulkan' for the runtime iree"
    assert "devices found: local-task, local-sync" in ended.case["error"]["hint"]
    assert "vulkan" not in hil("board", "devices", "sim").out


@pytest.mark.parametrize(
    ("device", "flag"), [("cuda", "--iree-cuda-target=sm_80"), ("hip", "--iree-rocm-target=gfx942")]
)
def test_program_for_missing_gpu_can_be_compiled(hil, summing, device, flag):
    listed = hil("board", "devices", "sim").out
    if device in listed:
        pytest.skip(f"this machine has a {device} device")
    refused = hil("compile", summing, "--device", device)
    assert refused.code == 4 and f"no device '{device}'" in refused.err and flag in refused.err
    assert hil("compile", summing, "--device", device, f"--compile-flag={flag}", "-o", "gpu.vmfb").code == 0
    ended = hil("run", "gpu.vmfb", "--runtime", "iree", "--device", device, *GIVEN, "--json")
    assert ended.case["outcome"] == "BOARD_UNFIT", ended.out
    ended = hil("run", "gpu.vmfb", *ON_VULKAN, *GIVEN, "--json")
    assert ended.case["outcome"] == "LOAD_ERROR", ended.out
    assert f"compiled for {device}" in ended.case["reason"]


def test_board_over_ssh_runs_on_its_gpu(hil, summing, tmp_path):
    with running_sshd(tmp_path / "sshd") as server:
        where = ["--identity", server.identity, "--known-hosts", server.known_hosts]
        ended = hil("board", "deploy", server.address, "--runtime", "iree", *where)
        assert ended.code == 0, ended.err
        assert "vulkan://" in hil("board", "devices", server.address, *where).out
        board = ["--board", server.address, *where, "--runtime", "iree"]
        ended = hil("run", summing, *board, "--device", "vulkan", *GIVEN, "--json")
        assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.out
        assert [part["device"] for part in ended.case["provenance"]["placement"]] == ["vulkan"]
        ended = hil("run", summing, *board, "--device", "vulkan://radeon", *GIVEN, "--json")
        assert (ended.code, ended.case["outcome"]) == (4, "BOARD_UNFIT"), ended.out


def test_virtual_board_without_mesa_has_no_gpu(hil, summing, board_x86):
    where = ["--identity", board_x86.identity, "--known-hosts", board_x86.known_hosts]
    address = f"root@{board_x86.ip}"
    ended = hil("run", summing, "--board", address, *where, "--device", "vulkan", *GIVEN, "--json")
    assert (ended.code, ended.case["outcome"]) == (4, "BOARD_UNFIT"), ended.out
    assert "has no device 'vulkan'" in ended.case["reason"]
    assert "vulkan" not in hil("board", "devices", address, *where).out


def test_suite_and_bundle_run_on_vulkan(hil):
    ended = hil("suite", "run", DIGITS_MODEL, "--no-layers", "--flow", "iree_vulkan", "--out", "suite")
    assert ended.code == 0, ended.out
    assert hil("bundle", "create", DIGITS_MODEL, "--device", "vulkan", "--cases", 1, "-o", "d.hilb").code == 0
    assert hil("bundle", "run", "d.hilb", "--device", "vulkan").code == 0


def test_pytest_uses_device_of_flow(environment, tmp_path):
    (tmp_path / "nets").mkdir()
    shutil.copy(DIGITS_MODEL, tmp_path / "nets")
    (tmp_path / "pytest.toml").write_text('[pytest]\nhil_models = ["nets"]\n')
    chosen = ["--hil-flow=iree", "--hil-flow=iree_vulkan", "--hil-out=found", "-k", "full_model"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--runtime-hw-type=sim", *chosen]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout
    rows = [json.loads(one.read_text()) for one in (tmp_path / "found").rglob("results.jsonl")]
    devices = {row["flow"]: [part["device"] for part in row["placement"]] for row in rows}
    assert devices == {"iree": ["local-task"], "iree_vulkan": ["vulkan"]}
