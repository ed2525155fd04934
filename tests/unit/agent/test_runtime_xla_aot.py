"""The runtime xla-aot, with libraries written in C instead of compiled by tfcompile."""

from __future__ import annotations

import json
import shutil
import subprocess

import numpy as np
import pytest

from hil.agent.runtimes.xla_aot import XlaAotRuntime
from hil.core.results import Part
from hil.core.tensors import TensorSpec
from hil.errors import LoadFailed, RunFailed
from hil.formats.xla_program import VALUES, Argument, LibrarySignature, write_signature

# total += sum(x); count is read-only; the run fails if the sum is negative.
SOURCE = """
#include <stdint.h>
static float *x, *total; static int32_t* count; static float mean;
const char* hil_xla_signature(void) { return SIGNATURE; }
void* hil_xla_new(void) { return &x; }
int64_t hil_xla_argument_size(void* p, int i) { return i == 0 ? X_SIZE : 4; }
int64_t hil_xla_result_size(void* p, int i) { return 4; }
void hil_xla_set(void* p, int i, void* d) { if (i == 0) x = d; else if (i == 1) total = d; else count = d; }
int hil_xla_run(void* p) {
  for (int i = 0; i < 3; i++) *total += x[i];
  mean = *total / *count;
  return *total >= 0;
}
void* hil_xla_result(void* p, int i) { return i == 0 ? (void*)&mean : (void*)total; }
"""
SIGNATURE = LibrarySignature(
    "step",
    (
        Argument(TensorSpec("x", "float32", (3,))),
        Argument(TensorSpec("total", "float32", ()), variable=True, assigned=True),
        Argument(TensorSpec("count", "int32", ()), variable=True),
    ),
    (TensorSpec("mean", "float32", ()),),
)
ONES = np.ones(3, np.float32)


@pytest.fixture
def build(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler here")

    def make(signature="", x_size=12):
        (tmp_path / "program.c").write_text(SOURCE)
        defines = [f"-DSIGNATURE={json.dumps(signature or write_signature(SIGNATURE))}", f"-DX_SIZE={x_size}"]
        subprocess.run(
            [compiler, "-shared", "-fPIC", *defines, "-o", tmp_path / "program.so", tmp_path / "program.c"], check=True
        )
        return tmp_path

    return make


def load(folder, device="", function=""):
    return XlaAotRuntime({}).load(folder, "program.so", device, function)


def test_xla_aot_renew_restores_variables_from_values_file(build):
    folder = build()
    (folder / VALUES).write_bytes(np.float32(10).tobytes() + np.int32(2).tobytes())
    program = load(folder, "cpu", "step")
    assert [spec.name for spec in program.inputs] == ["x"]
    assert [spec.name for spec in program.outputs] == ["mean", "variable total"]
    program.bind([ONES])
    for _ in range(2):
        program.renew()
        program.run()
        assert [float(value) for value in program.fetch()] == [6.5, 13.0]


def test_xla_aot_prefers_values_file_named_after_library(build):
    folder = build()
    (folder / VALUES).write_bytes(np.float32(1).tobytes() + np.int32(1).tobytes())
    (folder / f"program.{VALUES}").write_bytes(np.float32(10).tobytes() + np.int32(2).tobytes())
    program = load(folder)
    program.bind([ONES])
    program.run()
    assert float(program.fetch()[0]) == 6.5


def test_xla_aot_exposes_variables_without_values_file(build):
    program = load(build())
    assert [spec.name for spec in program.inputs] == ["x", "total", "count"]
    total = np.float32(1).reshape(())
    program.bind([ONES, total, np.int32(2).reshape(())])
    for _ in range(2):
        program.renew()
        program.run()
        assert [float(value) for value in program.fetch()] == [2.0, 4.0]
    assert total == 1


def test_xla_aot_bind_accepts_strided_inputs(build):
    program = load(build())
    whole = np.arange(12, dtype=np.float32)
    program.bind([whole[1::4], np.zeros((), np.float32), np.ones((), np.int32)])
    program.run()
    assert program.fetch()[0] == 1 + 5 + 9


def test_xla_aot_run_reports_program_error(build):
    program = load(build())
    program.bind([-ONES, np.zeros((), np.float32), np.ones((), np.int32)])
    with pytest.raises(RunFailed, match="step reported an error"):
        program.run()


def test_xla_aot_load_rejects_invalid_program(build, tmp_path):
    build()
    with pytest.raises(LoadFailed, match="unsupported xla-aot device 'gpu'"):
        load(tmp_path, device="gpu")
    with pytest.raises(LoadFailed, match=r"function 'other' not found in program\.so"):
        load(tmp_path, function="other")
    (tmp_path / VALUES).write_bytes(bytes(3))
    with pytest.raises(LoadFailed, match=r"has 3 bytes, but the program's variables need 8"):
        load(tmp_path)
    data = bytearray((tmp_path / "program.so").read_bytes())
    data[18:20] = b"\xf3\0"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "program.so").write_bytes(data)
    with pytest.raises(LoadFailed, match="compiled for riscv64, but this board is"):
        load(tmp_path / "other")
    (tmp_path / "other" / "program.so").write_bytes(b"MZ" + bytes(30))
    with pytest.raises(LoadFailed, match="not a Linux shared library"):
        load(tmp_path / "other")


def test_xla_aot_load_rejects_signature_size_mismatch(build):
    with pytest.raises(LoadFailed, match="argument x: 3 float32 of the program has 16 bytes, expected 12"):
        load(build(x_size=16))


def test_xla_aot_load_rejects_other_abi_version(build):
    folder = build(signature='{"abi": 99}')
    with pytest.raises(LoadFailed, match="version 99"):
        load(folder)
    shutil.copy(folder / "program.so", folder / "cut.so")
    (folder / "cut.so").write_bytes((folder / "cut.so").read_bytes()[:200])
    with pytest.raises(LoadFailed, match="cannot load the library"):
        XlaAotRuntime({}).load(folder, "cut.so", "", "")


def test_xla_aot_supports_only_cpu_device(build):
    folder = build()
    program = XlaAotRuntime({}).load(folder, "program.so", "cpu", "")
    assert program.placement() == (Part("cpu"),)
    with pytest.raises(LoadFailed, match="unsupported xla-aot device 'gpu'"):
        XlaAotRuntime({}).load(folder, "program.so", "gpu", "")
