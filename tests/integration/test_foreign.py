"""Programs compiled with IREE's tools: hil and iree-run-module agree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.vulkan import needs_vulkan

from hil.controller.storage.isolation.isolated import Isolated
from tools.check_foreign import FAILED, SUCCESS, check, read_node_tests

TOOLS = Path(sys.executable).parent
CPU = [
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
]
# Floats, bools, signed and unsigned integers, several outputs, a passed-through input, constants only.
SAMPLE = [
    *(
        "sqrt",
        "matmul_2d",
        "isnan",
        "mod_uint8",
        "nonzero_example",
        "top_k",
        "identity",
        "split_equal_parts_1d_opset13",
    ),
    *("cast_FLOAT_to_FLOAT16", "reduce_max_empty_set", "conv_with_strides_padding", "constant"),
]
# A torch program with a scalar input, a scalar output and unsigned integers.
TORCH = """
func.func @net(%x: !torch.vtensor<[4],ui8>, %n: !torch.int) -> (!torch.vtensor<[4],ui8>, !torch.int) {
  %one = torch.constant.int 1
  %0 = torch.aten.add.Scalar %x, %n, %one : !torch.vtensor<[4],ui8>, !torch.int, !torch.int -> !torch.vtensor<[4],ui8>
  return %0, %n : !torch.vtensor<[4],ui8>, !torch.int
}
"""


def compiled(source: Path, *flags: str) -> Path:
    """Compile a module with iree-compile."""
    program = source.with_suffix(".vmfb")
    subprocess.run([TOOLS / "iree-compile", source, "-o", program, *(flags or CPU)], check=True, capture_output=True)
    return program


@pytest.fixture(scope="module")
def torch_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save TORCH with its compiled program."""
    source = tmp_path_factory.mktemp("torch") / "net.mlir"
    source.write_text(TORCH)
    compiled(source)
    return source


def compare(tests: dict, folder: Path, jobs: int) -> list:
    with Isolated(jobs) as isolated:
        findings = list(check(tests, isolated, folder))
    assert [str(one) for one in findings if not one.equal and not one.known] == []
    return findings


@pytest.mark.slow
def test_foreign_program_sample_matches_iree_run_module(tmp_path, shared_cache, monkeypatch):
    monkeypatch.setenv("HIL_CACHE_DIR", str(shared_cache))
    tests = read_node_tests(SAMPLE, 1)
    assert sorted(tests) == sorted(SAMPLE)
    findings = compare(tests, tmp_path, 2)
    assert len({one.id.split()[0] for one in findings}) >= 10
    # The sample must contain passing and failing comparisons.
    assert {SUCCESS, FAILED} <= {one.tool for one in findings}
    assert all(one.tool == FAILED for one in findings if one.id == "sqrt wrong")


@pytest.mark.slow
@pytest.mark.timeout(7200)  # 200 compilations with three runs each
def test_200_foreign_programs_match_iree_run_module(tmp_path, shared_cache, monkeypatch):
    monkeypatch.setenv("HIL_CACHE_DIR", str(shared_cache))
    findings = compare(read_node_tests([], 5), tmp_path, 2)
    differing = {one.id.split()[0] for one in findings if not one.equal}
    assert len({one.id.split()[0] for one in findings} - differing) >= 200


@pytest.mark.slow
def test_undeclared_program_takes_types_from_inputs(hil, simulator, torch_module, tmp_path):
    program = torch_module.with_suffix(".vmfb")
    np.save(tmp_path / "x.npy", np.array([1, 2, 3, 254], np.uint8))
    np.save(tmp_path / "y.npy", np.array([2, 3, 4, 255], np.uint8))
    call = ("run", program, "--board", simulator, "--json")
    given = ("--input", "x.npy", "--input", "1", "--expected", "y.npy")
    ended = hil(*call, *given, "--expected", "1")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.out
    assert hil(*call, *given, "--expected", "2").case["outcome"] == "FAIL"
    ended = hil(*call, "--expected", "y.npy", "--expected", "1")
    assert ended.code == 2
    assert "missing input 'input0'" in ended.document["error"]["message"]
    # The async function is callable by name, but needs two fences.
    assert hil(*call, *given, "--expected", "1", "--function", "net$async").code == 2


def test_program_takes_types_from_adjacent_mlir(hil, simulator, torch_module):
    given = ("--input", "4xui8=1 2 3 254", "--input", "1", "--expected", "4xui8=2 3 4 255", "--expected", "1")
    ended = hil("run", torch_module, "--board", simulator, *given, "--json")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.out
    assert [output["dtype"] for output in ended.case["verdicts"][0]["outputs"]] == ["uint8", "int64"]


def test_run_calls_async_external_function_with_fences(hil, simulator, tmp_path):
    text = """func.func @f(%a: tensor<4xf32>) -> tensor<4xf32> {
      %0 = arith.addf %a, %a : tensor<4xf32>
      return %0 : tensor<4xf32>
    }"""
    (tmp_path / "fences.mlir").write_text(text)
    program = compiled(tmp_path / "fences.mlir", *CPU, "--iree-execution-model=async-external")
    call = ("run", program, "--board", simulator, "--input", "4xf32=1 2 3 4", "--iterations", "3")
    assert hil(*call, "--expected", "4xf32=2 4 6 8").code == 0
    assert hil(*call, "--expected", "4xf32=2 4 6 9").code == 1


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--expected_output=4xi8=2 3 4 -1", "--expected_output=(ignored)"], 0),
        (["--expected_output=(ignored)", "--expected_output=1"], 0),
        (["--expected_output=4xi8=2 3 4 -2", "--expected_output=(ignored)"], 1),
        # Equal values, but the tool distinguishes signed from unsigned integers.
        (["--expected_output=4xui8=2 3 4 255", "--expected_output=(ignored)"], 1),
        (["--expected_output=@y.npy", "--expected_output=(ignored)"], 1),
        # No output left to compare.
        (["--expected_output=(ignored)", "--expected_output=(ignored)"], 1),
    ],
)
def test_flagfile_expectations_match_iree_run_module(hil, simulator, torch_module, tmp_path, flags, code):
    np.save(tmp_path / "y.npy", np.array([2, 3, 4, 255], np.uint8))
    head = [f"--module={torch_module.with_suffix('.vmfb')}", "--function=net", "--input=4xi8=1 2 3 -2", "--input=1"]
    (tmp_path / "flags").write_text("\n".join([*head, *flags]))
    assert hil("run", "--flagfile", "flags", "--board", simulator).code == code


@pytest.mark.slow
def test_bundle_takes_types_of_undeclared_program_from_cases(hil, simulator, torch_module, tmp_path):
    program = torch_module.with_suffix(".vmfb")
    for name, values in (("x", [1, 2, 3, 254]), ("y", [2, 3, 4, 255]), ("wrong", [2, 3, 4, 5])):
        np.save(tmp_path / f"{name}.npy", np.array(values, np.uint8))
    given = ("--input", "x.npy", "--input", "1", "--expected")
    for outputs, name, code in (("y.npy", "good", 0), ("wrong.npy", "bad", 1)):
        made = hil("bundle", "create", program, *given, outputs, "--expected", "1", "-o", f"{name}.hilb")
        assert made.code == 0, made.err
        assert hil("bundle", "run", f"{name}.hilb", "--board", simulator).code == code
        verify = [sys.executable, "-m", "hil.agent", "verify", f"{name}.hilb"]
        assert subprocess.run(verify, cwd=tmp_path, capture_output=True).returncode == code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (
            "!torch.vtensor<[4],ui8>",
            "%i = torch.constant.int 1\n"
            "%0 = torch.aten.add.Scalar %a, %i, %i : !torch.vtensor<[4],ui8>, !torch.int, !torch.int -> "
            "!torch.vtensor<[4],ui8>",
        ),
        ("tensor<4xui8>", "%0 = stablehlo.add %a, %a : tensor<4xui8>"),
    ],
    ids=["torch, whose programs know no sign", "StableHLO, whose programs show it"],
)
def test_flagfile_export_adapts_unsigned_integers(hil, tmp_path, kind, body):
    (tmp_path / "add.mlir").write_text(f"func.func @f(%a: {kind}) -> {kind} {{ {body}\n return %0 : {kind} }}")
    assert hil("bundle", "create", "add.mlir", "--reference", "iree-llvm-cpu", "-o", "a.hilb").code == 0
    assert hil("bundle", "export", "a.hilb", "flags", "--to", "flagfile").code == 0
    tool = [TOOLS / "iree-run-module", "--flagfile=seed0.flagfile"]
    assert b"[SUCCESS]" in subprocess.run(tool, cwd=tmp_path / "flags", capture_output=True).stdout
    run = hil("bench", "--flagfile", tmp_path / "flags" / "seed0.flagfile", "--iterations", 1)
    assert run.code == 0, run.out


@needs_vulkan
def test_run_reads_unmappable_gpu_memory(hil, tmp_path, start_agent):
    text = """func.func @f(%a: tensor<4x1024xf32>) -> (tensor<4x1024xf32>, tensor<0xf32>) {
      %0 = arith.addf %a, %a : tensor<4x1024xf32>
      %1 = arith.constant dense<> : tensor<0xf32>
      return %0, %1 : tensor<4x1024xf32>, tensor<0xf32>
    }"""
    (tmp_path / "gpu.mlir").write_text(text)
    config = ['[board]\nhw_type = "gpu"', '[devices]\niree = "vulkan"', f'[connection]\naddress = "{start_agent()}"']
    (tmp_path / "gpu.toml").write_text("\n".join(config))
    given = ["--input", "4x1024xf32=1", "--expected", "4x1024xf32=2", "--expected", "0xf32="]
    ended = hil("run", "gpu.mlir", "--board", "gpu.toml", "--iterations", "3", *given, "--json")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.out
    assert "vulkan" in str(ended.case["provenance"])
