"""`hil bundle verifier`: the C program that verifies bundles, on the host and on a board without Python."""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.agents import Program, compile_mlir
from support.bundle_files import bundle, forged
from support.models import DIGITS

from hil.bundles import Bundle, MethodTestCase, MethodTestSuite, Signature
from hil.compare.verdict import compare_output
from hil.controller.backends.references.noise import encode_noise
from hil.controller.devices.deploy.wheels import fetch_iree_tool
from hil.controller.storage.cache import Cache
from hil.controller.workloads.bundles import verifier as verifiers
from hil.core.npy import save_npy
from hil.core.results import Artifact, Control, Deviation
from hil.core.tensors import DTYPES, NUMPY_DTYPES, SUB_BYTE_BITS, get_dtype_name, make_spec, pack, parse_dtype, to_bytes
from hil.errors import UsageError
from hil.formats.executorch_file import map_program, read_cases, read_methods
from hil.formats.iree_command import RUN_TOOL, own_tool

pytest.importorskip("ziglang")
pytestmark = pytest.mark.ci

EXECUTORCH = Path(__file__).parents[1] / "unit" / "executorch_files"
FUZZER = Path(__file__).parents[1] / "fuzzing" / "verifier.c"
HERE = verifiers.own_target()
MLIR = """
func.func @double(%x: tensor<2x3xf32>) -> tensor<2x3xf32> {
  %0 = arith.addf %x, %x : tensor<2x3xf32>
  return %0 : tensor<2x3xf32>
}
func.func @count(%x: tensor<?xi64>, %n: i32, %b: tensor<3xi1>, %z: tensor<2xcomplex<f32>>, %u: tensor<4xi8>)
    -> (tensor<?xi64>, i32, tensor<3xi1>, tensor<2xcomplex<f32>>, tensor<4xi8>) {
  %0 = arith.addi %n, %n : i32
  return %x, %0, %b, %z, %u : tensor<?xi64>, i32, tensor<3xi1>, tensor<2xcomplex<f32>>, tensor<4xi8>
}
"""


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("verifier") / "verify"
    verifiers.build_verifier(path, HERE)
    return path


@pytest.fixture(scope="module")
def program_for(tmp_path_factory) -> Callable[[str, str], Artifact]:
    """Compile the program with both functions for an architecture."""
    folder = tmp_path_factory.mktemp("mlir")
    (folder / "two.mlir").write_text(MLIR)

    @functools.cache
    def made(arch: str) -> Program:
        return compile_mlir(folder / "two.mlir", arch, folder / f"{arch}.vmfb")

    def make(arch: str, function: str) -> Artifact:
        one = made(arch)
        return Artifact("iree", one.path.name, {one.path.name: one.path}, one.digests, function, "iree")

    return make


@pytest.fixture
def verify(verifier: Path, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Run the verifier and return its exit code, stdout and stderr. Assert that it leaves no files."""
    (tmp_path / "tmp").mkdir()

    def call(*words: object) -> tuple[int, str, str]:
        environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
        ended = subprocess.run(
            [verifier, *map(str, words)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
        )
        assert not list((tmp_path / "tmp").iterdir())
        return ended.returncode, ended.stdout, ended.stderr

    return call


def doubling(artifact: Artifact, folder: Path, *, wrong: bool = False) -> Path:
    """Save a bundle of @double. With ``wrong``, two expected values of the second case are wrong."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    bad = 2 * x
    bad[1, 0] += 0.5
    bad[1, 2] += 1.5
    cases = [MethodTestCase([x], [2 * x]), MethodTestCase([x], [bad if wrong else 2 * x])]
    signatures = {"double": signature([x], [x])}
    path = folder / ("wrong.hilb" if wrong else "right.hilb")
    Bundle.create(artifact, [MethodTestSuite("double", cases)], signatures=signatures).save(path)
    return path


def signature(inputs, outputs):
    sides = (("x", inputs), ("y", outputs))
    return Signature(*(tuple(make_spec(f"{name}{at}", one) for at, one in enumerate(side)) for name, side in sides))


def test_verifier_reports_first_and_worst_mismatch(verify, program_for, tmp_path):
    tool = own_tool(RUN_TOOL)
    code, out, err = verify(doubling(program_for(platform.machine(), "double"), tmp_path), tool)
    assert (code, err) == (0, ""), out
    assert "PASS  double/1  0 of 6 out of tolerance, max abs 0" in out and "2 of 2 cases passed on " in out
    wrong = doubling(program_for(platform.machine(), "double"), tmp_path, wrong=True)
    code, out, _ = verify(wrong, tool)
    assert code == 1
    assert (
        "FAIL  double/1  2 of 6 out of tolerance, max abs 1.5\n"
        "      output y0: 2 of 6 values out of tolerance (rtol 1.3e-06, atol 1e-05), first at [1, 0]: 6, the reference "
        "has 6.5; worst at [1, 2]: 10, the reference has 11.5\n"
    ) in out
    assert verify("--rtol", "0.3", wrong, tool)[0] == 0
    assert verify("--case", "0", wrong, tool)[0] == 0
    code, out, _ = verify("--json", "--case", "double/1", wrong, tool)
    (case,) = json.loads(out)["cases"]
    assert (code, case["outcome"]) == (1, "FAIL")
    (output,) = case["outputs"]
    assert (output["first_index"], output["first_values"]) == ([1, 0], [6, 6.5])
    assert (output["worst_index"], output["worst_values"], output["mismatches"]) == ([1, 2], [10, 11.5], 2)


def test_command_passes_scalars_bool_complex_and_unsigned(verify, program_for, tmp_path):
    artifact = program_for(platform.machine(), "count")
    values = [
        np.array([1, -(2**60), 3], np.int64),
        np.array(21, np.int32),
        np.array([True, False, True]),
        np.array([1 + 2j, math.pi], np.complex64),
        np.array([0, 127, 128, 255], np.uint8),
    ]
    expected = [values[0], np.array(42, np.int32), *values[2:]]
    case = MethodTestCase(values, expected)
    path = tmp_path / "count.hilb"
    made = Bundle.create(
        artifact, [MethodTestSuite("count", [case])], signatures={"count": signature(values, expected)}
    )
    made.save(path)
    code, out, err = verify(path, own_tool(RUN_TOOL))
    assert code == 0, out + err


@pytest.mark.parametrize(
    "command, outcome, text",
    [
        (["false", "{module}"], "RUN_ERROR", "failed with exit code 1"),
        (["sh", "-c", "kill -SEGV $$"], "RUN_CRASH", "was killed by signal 11"),
        (["sleep", "100"], "TIMEOUT", "timeout after 1 s"),
        (["true", "{module}"], "RUN_ERROR", "did not write output y0"),
        (["./not-here"], "LOAD_ERROR", "cannot be started: No such file"),
        (["sh", "-c", "head -c 99 /dev/urandom > o-0.npy"], "RUN_ERROR", "output y0 cannot be read"),
    ],
)
def test_verifier_maps_command_failure_to_outcome(verify, program_for, tmp_path, command, outcome, text):
    path = doubling(program_for(platform.machine(), "double"), tmp_path)
    code, out, _ = verify("--timeout", "1", "--case", "0", path, "--", *command)
    assert code == 3
    assert out.startswith(f"{outcome}  double/0\n") and text in out, out


def test_verifier_rejects_invalid_arguments_and_files(verify, program_for, tmp_path):
    path = doubling(program_for(platform.machine(), "double"), tmp_path)
    raw = path.read_bytes()
    (tmp_path / "cut.hilb").write_bytes(raw[:-64])
    (tmp_path / "bit.hilb").write_bytes(raw[:-100] + bytes([raw[-100] ^ 1]) + raw[-99:])
    (tmp_path / "empty.hilb").touch()
    for words, text in [
        (["--nonsense"], "unknown option --nonsense"),
        (["--rtol", "x", path], "invalid --rtol 'x'"),
        (["--rtol", "1", path], "rtol is 1: with an rtol of 1 or more"),
        (["--method", "halve", path], "no method 'halve'"),
        (["--case", "7", path], "no case '7'"),
        ([], "missing argument BUNDLE"),
        ([tmp_path / "none.hilb"], "No such file"),
        ([tmp_path], "not a regular file"),
        ([tmp_path / "empty.hilb"], "the file is empty"),
        ([tmp_path / "cut.hilb"], "truncated"),
        ([tmp_path / "bit.hilb"], "corrupt"),
        ([Path(__file__)], "is not a bundle"),
    ]:
        code, _, err = verify(*words)
        assert code == 2 and text in err, (words, err)
    code, out, _ = verify("--list", path)
    assert (code, out.splitlines()[0]) == (0, "double/0: x0: 2x3 float32 -> y0: 2x3 float32")


def test_bundle_without_runtime_needs_command(verify, tmp_path):
    bundle(tmp_path).save(tmp_path / "none.hilb")
    code, _, err = verify(tmp_path / "none.hilb")
    assert code == 2 and "missing command for the runtime 'none'" in err


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["methods"][0]["cases"][0]["inputs"][0].update(shape=[1, 6]),
        lambda document: document["methods"][0]["cases"][0].update(rtol=-1.0),
        lambda document: document["methods"][0]["cases"][1].update(name=document["methods"][0]["cases"][0]["name"]),
        lambda document: document["program"].update(main="nothing"),
        lambda document: document["program"]["files"][0].update(name="../../etc/passwd"),
        lambda document: document["blobs"].pop(),
        lambda document: document.update(more=1),
        lambda document: b'{"blobs":[],"blobs":[]}',
        lambda document: b"[" * 100_000,
        lambda document: document["methods"].clear(),
    ],
)
def test_verifier_rejects_manifests_like_hil(verify, tmp_path, change):
    path = tmp_path / "forged.hilb"
    path.write_bytes(forged(bundle(tmp_path), change))
    with pytest.raises(UsageError):
        Bundle.open(path)
    code, out, err = verify("--list", path)
    assert (code, out) == (2, "") and err.startswith("verify: ")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"accept": ("max_abs<=0.5",)}, "the case has criteria"),
        ({"control": {"y0": Control("float16", "hil", Deviation(1e-3, 2e-3))}}, "the case has a control"),
    ],
)
def test_verifier_rejects_case_with_other_criteria(verify, tmp_path, more, text):
    x = np.arange(6, dtype=np.float32)
    suites = [MethodTestSuite("m", [MethodTestCase([x], [2 * x], **more)])]
    path = tmp_path / "a.hilb"
    Bundle.create(fake(tmp_path), suites, signatures={"m": signature([x], [x])}).save(path)
    code, out, err = verify("--list", path)
    assert (code, out) == (2, "") and text in err and "hil bundle run" in err


# ---- verdicts match hil


def values(rng: np.random.Generator, name: str) -> np.ndarray:
    """Return a tensor of a dtype with a random size and scale. Some tensors have one value or are empty."""
    dtype, shape = parse_dtype(name), ((), (7,), (3, 5), (40,), (2, 0))[rng.integers(5)]
    if name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if name.startswith(("int", "uint")):
        info = ml_dtypes.iinfo(dtype)
        span = min(int(info.max), 9) if rng.integers(2) else int(info.max)
        return np.asarray(
            rng.integers(max(int(info.min), -span), span, shape, endpoint=True, dtype=np.int64)
            if info.max < 2**63
            else rng.integers(0, span, shape, endpoint=True, dtype=np.uint64)
        ).astype(dtype)
    scale = 10.0 ** rng.integers(-9, 4)
    with np.errstate(all="ignore"):
        made = rng.standard_normal(shape) * scale + (scale * 1e3 if rng.integers(4) == 0 else 0)
        if np.dtype(dtype).kind == "c":
            made = made + 1j * rng.standard_normal(shape)
        return np.asarray(made).astype(dtype)


def disturbed(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    """Return a tensor close to another: equal, rounded, far off, zero, negative, with NaN and infinities."""
    how, name = rng.integers(9), get_dtype_name(array.dtype)
    made = array.copy()
    if not array.size or how == 0:
        return made
    place = rng.integers(array.size)
    with np.errstate(all="ignore"):
        if name == "bool":
            made.flat[place] = not made.flat[place]
        elif name.startswith(("int", "uint")):
            made.reshape(-1).view(np.uint8)[place * array.itemsize] ^= 1
        elif how == 1:
            made = np.zeros_like(array)
        elif how == 2:
            made = -array
        elif how == 3:
            made.flat[place] = (math.nan, math.inf, -math.inf)[rng.integers(3)]
        elif how == 4:
            made = np.roll(array, 1)
        else:
            kind = np.complex128 if array.dtype.kind == "c" else np.float64
            noise = 1 + rng.standard_normal(array.shape) * 10.0 ** rng.integers(-9, 0)
            made = np.asarray(array.astype(kind) * noise).astype(array.dtype)
    return made


# Case -> dtype, tolerance and noise of tensors that have values below the tolerance, with the wrong sign.
SMALL = {
    1: ("float32", {}, None),
    2: ("float32", {}, encode_noise(np.full((12, 3), 1e-9))),
    3: ("float32", {}, encode_noise(np.full((12, 3), 1e-4))),
    4: ("float32", {"atol": 1e-3}, None),
    5: ("int8", {"atol": 2.0}, None),
    6: ("float32", {}, encode_noise(np.zeros((12, 3)))),
    7: ("int16", {"atol": 1.0}, None),
    8: ("float32", {}, None),
    9: ("float32", {}, encode_noise(np.full((1, 5), 1e-14))),
    10: ("float32", {}, encode_noise(np.full((1, 17), 1e-14))),
}


def test_verifier_verdicts_match_hil(verify, tmp_path):
    rng = np.random.default_rng(7)
    answers = tmp_path / "answers"
    answers.mkdir()
    names = [name for name in DTYPES if name != "string"]
    wanted, suites, signatures = {}, [], {}
    for number in range(400):
        name = names[number % len(names)]
        reference = values(rng, name)
        if rng.integers(12) == 0 and name.startswith(("float", "bfloat")) and name != "float8_e8m0fnu":
            with np.errstate(all="ignore"):
                reference.fill(math.nan)
        actual = disturbed(rng, reference)
        if rng.integers(20) == 0:
            actual = actual.reshape(1, *actual.shape)
        if rng.integers(20) == 0 and name in NUMPY_DTYPES:
            actual = values(rng, NUMPY_DTYPES[rng.integers(len(NUMPY_DTYPES))])
        tolerance = {}
        if rng.integers(3) == 0:
            tolerance = {"rtol": float(10.0 ** -rng.integers(1, 6))}
            if rng.integers(2):
                tolerance["atol"] = float(10.0 ** -rng.integers(2, 9))
        noise = None
        if rng.integers(3) == 0:
            scale = 10.0 ** -rng.integers(0, 8)
            noise = encode_noise(
                scale * 10.0 ** rng.integers(-3, 1, reference.shape) * rng.integers(0, 2, reference.shape)
            )
        if number == 0:  # only noise makes this pass: random cases rarely do
            name, tolerance, noise = "float32", {}, encode_noise(np.full(41, 1e-2))
            reference = np.linspace(-1000, 1000, 41, dtype=np.float32)
            actual = reference + np.float32(5e-3)
        if number in SMALL:  # random cases rarely have values below the tolerance
            name, tolerance, noise = SMALL[number]
            reference = np.outer(np.linspace(1, 2, 12), [640, 640, 1e-6]).astype(parse_dtype(name))
            if name == "int8":
                reference = np.array([[100, 1, 1, 1], [90, 1, -1, 1]], np.int8)
            actual = reference * np.array([1, *[-1] * (reference.shape[1] - 1)]) if name == "int8" else reference.copy()
            actual = np.asarray(actual).astype(reference.dtype)
            if name != "int8":
                actual[:, 2] *= -1
            if number == 6:
                reference[:, 2] = 0
            if number == 7:  # one step from 0, in an integer
                reference = np.where(reference.astype(np.int64) > 600, 90, 0).astype(np.int16)
                actual = reference + np.int16(1)
            if number > 7:  # one small value in a single row
                reference = np.array([[*[9.0] * (16 if number == 10 else 4), 1e-6]], np.float32)
                actual = reference.copy()
                actual[:, -1] *= -1
        method = f"m{number}"
        signatures[method] = signature([], [reference])
        more = {"noise": {"y0": noise}} if noise is not None else {}
        case = MethodTestCase([], [reference], **tolerance, **more)
        try:
            verdict = compare_output("y0", actual, reference, noise=noise, **tolerance)
            Bundle.create(fake(tmp_path), [MethodTestSuite(method, [case])], signatures={method: signatures[method]})
        except UsageError:
            del signatures[method]
            continue  # a tolerance that could not fail: bundles reject it
        wanted[method] = verdict
        suites.append(MethodTestSuite(method, [case]))
        (answers / method).mkdir()
        if name in NUMPY_DTYPES:
            save_npy(answers / method / "o-0.npy", actual)
        elif actual.shape == reference.shape:
            raw = pack(actual).data if name in SUB_BYTE_BITS else to_bytes(actual)
            (answers / method / "o-0.bin").write_bytes(raw)
        else:
            del wanted[method], signatures[method]
            suites.pop()
    path = tmp_path / "all.hilb"
    Bundle.create(fake(tmp_path), suites, signatures=signatures).save(path)
    code, out, err = verify("--json", path, "cp", "-r", f"{answers}/{{function}}/.", "{folder}")
    found = {case["method"]: case for case in json.loads(out)["cases"]}
    assert code == 1 and len(found) == len(wanted) > 250, err
    seen = set()
    for method, verdict in wanted.items():
        (output,) = found[method]["outputs"]
        about = (verdict, output)
        outcome = "PASS" if verdict.passed else "BLIND" if verdict.blind else "FAIL"
        seen.add((outcome, verdict.noise is not None))
        assert found[method]["outcome"] == outcome, about
        for key in ("elements", "mismatches", "nonfinite", "masked"):
            assert output[key] == getattr(verdict, key), about
        for key in ("first_index", "worst_index"):
            index = getattr(verdict, key)
            assert output[key] == (None if index is None else list(index)), about
        for key in ("max_abs", "max_rel"):
            value = getattr(verdict, key)
            assert (output[key] is None) == (value is None), about
            assert value is None or float(output[key]) == pytest.approx(value, rel=1e-9), about
        for key in ("rtol", "atol"):
            mine = verdict.tolerance and getattr(verdict.tolerance, key)
            assert (output["tolerance"] or {}).get(key) == (mine if mine is None else pytest.approx(mine)), about
    assert seen == {(outcome, noise) for outcome in ("PASS", "FAIL", "BLIND") for noise in (False, True)}


def fake(folder: Path) -> Artifact:
    (folder / "none.bin").write_bytes(b"nothing")
    return Artifact("none", "none.bin", {"none.bin": folder / "none.bin"}, {}, "m0", "nobody")


# ---- ExecuTorch bundled programs


@pytest.mark.parametrize("name", ["mixed", "methods"])
def test_verifier_judges_executorch_bundle_like_hil(verify, tmp_path, name):
    """The runner is a script with ExecuTorch's flags that returns known outputs."""
    path = EXECUTORCH / f"{name}.bpte"
    data = map_program(path)
    methods, cases = read_methods(data), read_cases(data)
    script = tmp_path / "executor_runner"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/called\nfor word; do case $word in\n--output_file=*) out=${{word#*=}} ;;\n'
        f"--method_name=*) method=${{word#*=}} ;;\nesac; done\ncp {tmp_path}/${{method:-forward}}/* $(dirname $out)/\n"
    )
    script.chmod(0o755)
    for method, given in cases.items():
        (tmp_path / method).mkdir()
        for place, array in enumerate(given[0].expected_outputs):
            (tmp_path / method / f"o-{place}.bin").write_bytes(np.ascontiguousarray(array).tobytes())
    code, out, err = verify("--case", "0", path, script)
    assert code == 0 and out.count("PASS") == len(cases), out + err
    called = (tmp_path / "called").read_text().splitlines()
    inputs = len(methods["forward"].inputs)
    line = next(one for one in called if "--method_name" not in one)
    assert "/program/program.pte " in line and line.split("--inputs=")[1].split()[0].count(",") == inputs - 1
    wrong = np.array(cases["forward"][0].expected_outputs[0])
    wrong.flat[1] += 0.5
    (tmp_path / "forward" / "o-0.bin").write_bytes(wrong.tobytes())
    code, out, _ = verify("--method", "forward", "--case", "0", path, script)
    assert code == 1 and "1 of 6 values out of tolerance (rtol " in out and "first and worst at [0, 1]: " in out, out
    (tmp_path / "forward" / "o-0.bin").write_bytes(wrong.tobytes()[:-4])
    code, out, _ = verify("--method", "forward", "--case", "0", path, script)
    assert code == 1 and "has 20 bytes, expected 24" in out


# ---- invalid files

MUTATIONS = 4000


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("fuzzer") / "fuzz"
    parts = [one for one in verifiers.SOURCES.glob("*.c") if one.name not in ("main.c", "command.c")]
    safe = [
        "-O1",
        "-fsanitize=undefined",
        "-fsanitize-trap=undefined",
        "-Dcalloc=guarded_calloc",
        "-Dfree=guarded_free",
    ]
    verifiers.run_zig_cc(
        [*verifiers.FLAGS, *safe, f"-I{verifiers.SOURCES}", *map(str, parts), str(FUZZER), "-lm", "-o", str(path)], HERE
    )
    return path


@pytest.mark.parametrize("name", [pytest.param("mixed.bpte", marks=pytest.mark.slow), "methods.bpte"])
def test_verifier_survives_mutated_executorch_bundle(fuzzer, name):
    seed = random.randrange(1 << 31)
    ended = subprocess.run([fuzzer, EXECUTORCH / name, str(seed), str(MUTATIONS)], capture_output=True, text=True)
    assert ended.returncode == 0, f"seed {seed}: {ended}"
    assert int(ended.stdout.split()[2]) > 20


def test_verifier_survives_mutated_bundle(fuzzer, tmp_path):
    signed = tmp_path / "one.hilb"
    plain = bundle(tmp_path).methods[0].cases[0]
    noise = {"y": encode_noise(np.full(plain.expected_outputs["y"].shape, 1e-3))}
    case = MethodTestCase(plain.inputs, plain.expected_outputs, 1e-3, 1e-4, "näme \U0001f600", "s", noise)
    bundle(tmp_path, case).save(signed)
    seed = random.randrange(1 << 31)
    ended = subprocess.run([fuzzer, signed, str(seed), str(MUTATIONS)], capture_output=True, text=True)
    assert ended.returncode == 0, f"seed {seed}: {ended}"
    assert int(ended.stdout.split()[2]) > 20


# ---- on a board without Python


@pytest.mark.slow  # Zig builds musl first on a new machine
@pytest.mark.board
def test_board_without_python_verifies_bundle(make_board, program_for, tmp_path, hil, shared_cache):
    board = make_board(arch="aarch64")
    board.run(["sh", "-c", "rm -f /usr/bin/python3* /usr/bin/perl*"], check=True)
    built = hil("bundle", "verifier", "--target", "aarch64-linux-musl", "-o", "verify", "--json")
    assert (built.code, built.document["target"]) == (0, "aarch64-linux-musl"), built.err
    tool = fetch_iree_tool(RUN_TOOL, "aarch64", cache=Cache(shared_cache), board="arm")
    made = hil(
        "bundle", "create", DIGITS / "digits_cnn.onnx", "--cases", "2", "-o", "digits.hilb",
        "--compile-flag=--iree-llvmcpu-target-triple=aarch64-unknown-linux-gnu",
        "--compile-flag=--iree-llvmcpu-target-cpu=generic",
    )  # fmt: skip
    assert made.code == 0, made.err
    files = [
        tmp_path / "verify",
        tool,
        tmp_path / "digits.hilb",
        doubling(program_for("aarch64", "double"), tmp_path),
        doubling(program_for("aarch64", "double"), tmp_path, wrong=True),
    ]
    for file in files:
        put = f"cat > /root/{file.name} && chmod 755 /root/{file.name}"
        subprocess.run([*board.ssh(), put], input=file.read_bytes(), check=True)
    assert board.run(["python3", "-c", "1"]).returncode == 127
    good = board.run(["/root/verify", "/root/right.hilb", "/root/iree-run-module"])
    assert good.returncode == 0 and "2 of 2 cases passed on " in good.stdout and "(aarch64)" in good.stdout, good
    digits = board.run(["/root/verify", "/root/digits.hilb", "/root/iree-run-module"])
    assert digits.returncode == 0 and "2 of 2 cases passed on " in digits.stdout, digits
    bad = board.run(["/root/verify", "/root/wrong.hilb", "/root/iree-run-module"])
    assert bad.returncode == 1
    assert "first at [1, 0]: 6, the reference has 6.5; worst at [1, 2]: 10, the reference has 11.5" in bad.stdout
