"""`hil suite run` with ExecuTorch flows on the simulator."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import pytest
from support.commands import with_tools
from support.plugin_runs import Project

pytest.importorskip("executorch")

# Delegated in whole, in part, not at all; missing kernel, failing module, skipped test.
SAMPLE = (
    "abs_edge_cases",
    "add_dtype-float32",
    "add_f32_alpha",
    "avgpool3d_ceil_mode",
    "conv1d_basic",
    "conv2d_basic",
    "gelu_f32_tanh_approximation",
    "leaky_relu_dtype-float32",
    "linear_dtype-float32",
    "lstm_bidirectional",
    "sigmoid_dtype-float32",
    "split_dtype-float32",
)
FILTERS = [part for name in SAMPLE for part in ("--filter", f"={name}")]


@pytest.fixture(scope="module")
def run(tmp_path_factory, shared_cache):
    """Run the sample with XNNPACK and return its directory."""
    out = tmp_path_factory.mktemp("runs") / "xnnpack"
    command = [sys.executable, "-m", "hil.controller.cli.main", "suite", "run", "@operators", "--flow", "xnnpack"]
    environment = {**os.environ, "HIL_CACHE_DIR": str(shared_cache)}
    ended = subprocess.run([*command, *FILTERS, "--out", str(out)], env=environment, capture_output=True, text=True)
    assert (out / "results.csv").exists(), ended.stderr
    return out


@pytest.fixture(scope="module")
def rows(run):
    with (run / "results.csv").open() as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def test_suite_reports_expected_outcome_per_case(rows):
    assert set(rows) == set(SAMPLE)
    ended = {name: rows[name]["ended"] for name in SAMPLE}
    assert ended == {
        **dict.fromkeys(SAMPLE, "PASS"),
        "abs_edge_cases": "SKIP",
        "avgpool3d_ceil_mode": "LOAD_ERROR",
        "gelu_f32_tanh_approximation": "FAIL",
        "linear_dtype-float32": "IMPORT_ERROR",
    }
    assert "mat1 and mat2 shapes cannot be multiplied" in rows["linear_dtype-float32"]["message"]
    assert "aten::avg_pool3d.out" in rows["avgpool3d_ceil_mode"]["message"]


def test_suite_expects_failures_in_builtin_list(rows):
    assert {row["outcome"] for row in rows.values()} == {"PASS", "SKIP", "XFAIL"}


def test_results_row_has_fields_of_tester_report(rows):
    row = rows["add_dtype-float32"]
    assert json.loads(row["params"]) == {"dtype": "float32"}
    assert (row["flow"], row["delegated"], row["delegated_nodes"], row["undelegated_nodes"]) == (
        "xnnpack",
        "yes",
        "1",
        "0",
    )
    assert float(row["lower_s"]) > 0 and int(row["program_bytes"]) > 0 and row["quantise_s"] == ""
    assert float(row["output_0_max_abs"]) <= 1e-5 and row["output_0_sqnr_db"] == "inf"
    assert rows["add_f32_alpha"]["delegated"] == "no"
    assert json.loads(rows["add_f32_alpha"]["undelegated_ops"]) == {"aten.add.Tensor": 1}


def test_reports_show_delegated_share(run):
    for name in ("summary.md", "report.html"):
        assert "delegated: " in (run / name).read_text()


def test_suite_compares_quantized_program_with_plain_model(hil, tmp_path):
    out = tmp_path / "int8"
    filters = ("--filter", "=conv2d_basic", "--filter", "=add_dtype-float32")
    ended = hil("suite", "run", "@operators", "--flow", "xnnpack-static-int8-per-channel", *filters, "--out", out)
    assert ended.code == 0, ended.out + ended.err
    with (out / "results.csv").open() as file:
        found = {row["id"]: row for row in csv.DictReader(file)}
    for row in found.values():
        assert float(row["quantise_s"]) > 0
        assert float(row["plain_sqnr_db"]) > 20


def test_hil_finds_all_failures_of_executorch_tester(environment, tmp_path):
    command = [sys.executable, "-m", "tools.check_executorch", *FILTERS, "--json"]
    ended = subprocess.run(command, env=with_tools(environment), cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {one["id"]: one["kind"] for one in json.loads(ended.stdout)["cases"]}
    assert set(found) == set(SAMPLE)
    assert found["gelu_f32_tanh_approximation"] == "out of hil's tolerance, within the tester's"


WRITE = """
import sys
import torch
from executorch.devtools import BundledProgram
from executorch.devtools.bundled_program.config import MethodTestCase, MethodTestSuite
from executorch.devtools.bundled_program.serialize import serialize_from_bundled_program_to_flatbuffer as serialized
from executorch.exir import to_edge_transform_and_lower

module, inputs = torch.nn.Linear(4, 2).eval(), (torch.ones(3, 4),)
program = torch.export.export(module, inputs)
torch.export.save(program, f"{sys.argv[1]}/exported.pt2")
lowered = to_edge_transform_and_lower(program).to_executorch()
open(f"{sys.argv[1]}/lowered.pte", "wb").write(lowered.buffer)
case = MethodTestCase(inputs=inputs, expected_outputs=(module(*inputs).detach(),))
bundle = BundledProgram(lowered, [MethodTestSuite(method_name="forward", test_cases=[case])])
open(f"{sys.argv[1]}/bundled.bpte", "wb").write(serialized(bundle))
"""


def test_suite_runs_exported_lowered_and_bundled_programs(hil, tmp_path):
    nets, out = tmp_path / "nets", tmp_path / "out"
    nets.mkdir()
    subprocess.run([sys.executable, "-c", WRITE, str(nets)], check=True, capture_output=True)
    ended = hil("suite", "run", nets, "--flow", "executorch-portable", "--out", out)
    records = {one["id"]: one for one in map(json.loads, (out / "results.jsonl").read_text().splitlines())}
    assert {name: one["ended"] for name, one in records.items()} == {
        "bundled_forward_0": "PASS",
        "exported_full_model": "PASS",
        "lowered_full_model": "IMPORT_ERROR",
    }, ended.out
    assert records["bundled_forward_0"]["against"] == "bundled.bpte"
    assert "NAME.expected.npz" in records["lowered_full_model"]["hint"]


METHODS = """
import sys
import torch
from executorch.devtools import BundledProgram
from executorch.devtools.bundled_program.config import MethodTestCase, MethodTestSuite
from executorch.devtools.bundled_program.serialize import serialize_from_bundled_program_to_flatbuffer as serialized
from executorch.exir import to_edge_transform_and_lower


class Method(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


methods = {"double": Method(2.0), "halve": Method(0.5)}
given = [torch.arange(1, 5, dtype=torch.float32) + number for number in range(10)]
exported = {name: torch.export.export(method.eval(), (given[0],)) for name, method in methods.items()}
suites = []
for name, method in methods.items():
    expected = [method(x) for x in given]
    if name == "halve":
        expected[7] = expected[7] + 1
    cases = [MethodTestCase(inputs=(x,), expected_outputs=(y,)) for x, y in zip(given, expected)]
    suites.append(MethodTestSuite(method_name=name, test_cases=cases))
bundle = BundledProgram(to_edge_transform_and_lower(exported).to_executorch(), suites)
open(f"{sys.argv[1]}/two.bpte", "wb").write(serialized(bundle))
"""


def test_suite_and_pytest_run_all_methods_of_bundled_program(hil, tmp_path, environment):
    nets = tmp_path / "nets"
    nets.mkdir()
    subprocess.run([sys.executable, "-c", METHODS, str(nets)], check=True, capture_output=True)
    wanted = {f"two_{method}_{number}": "PASS" for method in ("double", "halve") for number in range(10)}
    wanted["two_halve_7"] = "FAIL"
    ended = hil("suite", "run", nets, "--flow", "executorch-portable", "--json")
    assert {case["id"]: case["outcome"] for case in ended.document["cases"]} == wanted and ended.code == 1, ended.err
    project = Project(tmp_path / "project", environment).set_up(nets / "two.bpte")
    tested = project.test("--hil-flow=executorch-portable", "--runtime-hw-type=sim")
    words = {"PASS": "passed", "FAIL": "failure"}
    assert tested.outcomes == {f"{name}-sim": words[end] for name, end in wanted.items()}, tested.out


# The whole suite takes over half an hour; see benchmarks/README.md.
@pytest.mark.slow
@pytest.mark.parametrize("flow", ["xnnpack", "executorch-portable"])
def test_operators_match_expected_failures(flow, hil, tmp_path):
    kinds = [word for name in ("gelu", "median", "prelu", "round") for word in ("--filter", f"{name}_*")]
    ended = hil("suite", "run", "@operators", "--flow", flow, *kinds, "--out", tmp_path / "some", "--json")
    assert ended.code == 0, ended.out[-5000:]
    assert {"PASS", "XFAIL"} <= {case["outcome"] for case in ended.document["cases"]}
