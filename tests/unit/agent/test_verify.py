"""`python -m hil.agent verify`: verify a bundle on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from onnx import TensorProto, helper
from support.bundle_files import bundle
from support.models import save_model

from hil.agent import verify
from hil.bundles import Bundle, MethodTestCase, MethodTestSuite, Signature
from hil.core.results import Artifact
from hil.core.tensors import TensorSpec

F32 = np.float32
VECTOR = TensorSpec("x", "float32", ("N",))


def bundled(folder: Path, node: onnx.NodeProto, *cases: MethodTestCase, inputs=(VECTOR,)) -> Path:
    """Save a bundle with an ONNX model of one node, for ONNX Runtime."""
    values = [(spec.name, TensorProto.FLOAT, list(spec.shape)) for spec in inputs]
    model = save_model(folder / "model.onnx", [node], values, [("y", TensorProto.FLOAT, ["N"])])
    output = TensorSpec("y", "float32", ("N",))
    program = Artifact("onnxruntime", "model.onnx", {"model.onnx": model}, {}, "test", "none", (), inputs, (output,))
    path = folder / "b.hilb"
    Bundle.create(program, [MethodTestSuite("test", cases)]).save(path)
    return path


@pytest.fixture
def twice(tmp_path):
    def make(*expected: list[float], **more) -> Path:
        x = np.array([1, 2, 3], F32)
        cases = [MethodTestCase([x], [np.array(one, F32)], **more) for one in expected]
        return bundled(tmp_path, helper.make_node("Add", ["x", "x"], ["y"]), *cases)

    return make


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    code = verify.main([str(one) for one in arguments])
    return code, *capsys.readouterr()


@pytest.mark.ci
def test_verify_passes_correct_outputs(twice, capsys):
    code, out, _ = call(capsys, twice([2, 4, 6], [2, 4, 6.000001]))
    assert code == 0
    assert "PASS  test/0  0 of 3 out of tolerance" in out
    assert "2 of 2 cases passed" in out


def test_verify_reports_position_of_wrong_value(twice, capsys):
    code, out, _ = call(capsys, twice([2, 4, 6], [2, 4, 7], [2, np.nan, 6]))
    assert code == 1
    assert "FAIL  test/1  1 of 3 out of tolerance" in out
    assert "worst at [2]: 6, the reference has 7" in out
    assert "1 value NaN or infinite" in out
    assert "1 of 3 cases passed" in out


@pytest.mark.ci
def test_verify_uses_tolerance_of_case(twice, capsys):
    assert call(capsys, twice([2, 4, 6.5], rtol=0.1))[0] == 0
    assert call(capsys, twice([2, 4, 6.5], rtol=0.01))[0] == 1


@pytest.mark.ci
def test_verify_uses_criteria_of_case(twice, capsys):
    assert call(capsys, twice([2, 4, 6.5], accept=("argmax",)))[0] == 0
    code, out, _ = call(capsys, twice([2, 4, 6.5], accept=("y: max_abs<=0.1",)))
    assert code == 1 and "max_abs<=0.1 is not met: the value is 0.5" in out
    assert call(capsys, twice([2, 4, 6], accept=("max_abs<=100",)))[1].startswith("BLIND")


def test_verify_json_contains_all_values(twice, capsys):
    code, out, _ = call(capsys, twice([2, 4, 6], [2, 4, np.inf]), "--json")
    document = json.loads(out)
    assert document["exit_code"] == code == 1
    assert [one["outcome"] for one in document["cases"]] == ["PASS", "FAIL"]
    assert document["cases"][1]["outputs"][0]["worst_values"] == [6.0, "inf"]
    assert document["cases"][0]["device_ns"] > 0


@pytest.mark.ci
def test_verify_continues_after_runtime_error(tmp_path, capsys):
    inputs = (VECTOR, TensorSpec("z", "float32", ("M",)))
    x = np.ones(3, F32)
    cases = [MethodTestCase([x, other], [2 * x]) for other in (x, np.ones(2, F32), x)]
    code, out, _ = call(capsys, bundled(tmp_path, helper.make_node("Add", ["x", "z"], ["y"]), *cases, inputs=inputs))
    assert code == 3
    assert [line.split()[0] for line in out.splitlines() if "test/" in line] == ["PASS", "RUN_ERROR", "PASS"]


@pytest.mark.ci
def test_verify_runs_program_in_subdirectory(twice, tmp_path, capsys):
    path = twice([2, 4, 6])
    opened = Bundle.open(path)
    made = opened.extract(_folder(tmp_path))
    (file,) = made.files.values()
    program = replace(made, main="models/m.onnx", files={"models/m.onnx": file})
    Bundle.create(program, [MethodTestSuite("test", [_given(opened)])]).save(path)
    assert call(capsys, path)[0] == 0


def test_verify_fails_without_cases(tmp_path, capsys):
    spec = TensorSpec("x", "float32", (1,))
    signature = Signature((spec,), (spec,))
    (tmp_path / "model.onnx").write_bytes(b"no model")
    program = Artifact("onnxruntime", "model.onnx", {"model.onnx": tmp_path / "model.onnx"}, {}, "f", "none")
    case = MethodTestCase([np.ones(1, F32)], [np.ones(1, F32)])
    made = Bundle.create(program, [MethodTestSuite("f", [case])], signatures={"f": signature, "g": signature})
    made.save(tmp_path / "b.hilb")
    code, out, _ = call(capsys, tmp_path / "b.hilb", "--method", "g")
    assert (code, "0 of 0 cases passed" in out) == (5, True)


def _given(bundle: Bundle) -> MethodTestCase:
    case = bundle.methods[0].cases[0]
    return MethodTestCase(case.inputs, case.expected_outputs)


def test_verify_rejects_input_spec_mismatch(twice, tmp_path, capsys):
    path = twice([2, 4, 6])
    opened = Bundle.open(path)
    made = opened.extract(_folder(tmp_path))
    other = TensorSpec("x", "float32", ("N", 2))
    wrong = MethodTestCase([np.ones((3, 2), F32)], [np.ones(3, F32)])
    program = Artifact(made.runtime, made.main, made.files, made.digests, "test", "none", (), (other,), made.outputs)
    Bundle.create(program, [MethodTestSuite("test", [wrong, wrong])]).save(path)
    code, out, _ = call(capsys, path)
    assert code == 3
    assert out.count("LOAD_ERROR") == 2
    assert "takes N float32, but the bundle lists Nx2 float32" in out


def _folder(tmp_path: Path) -> Path:
    (tmp_path / "program").mkdir()
    return tmp_path / "program"


def test_verify_rejects_missing_runtime(tmp_path, capsys):
    bundle(tmp_path).save(tmp_path / "b.hilb")
    code, _, err = call(capsys, tmp_path / "b.hilb")
    assert code == 2
    assert "runtime 'none' not found on this board" in err


def test_verify_reports_load_error_for_invalid_model(tmp_path, capsys):
    (tmp_path / "model.onnx").write_bytes(b"no model")
    spec = TensorSpec("x", "float32", (1,))
    program = Artifact(
        "onnxruntime", "model.onnx", {"model.onnx": tmp_path / "model.onnx"}, {}, "f", "none", (), (spec,), (spec,)
    )
    case = MethodTestCase([np.ones(1, F32)], [np.ones(1, F32)])
    Bundle.create(program, [MethodTestSuite("f", [case, case])]).save(tmp_path / "b.hilb")
    code, out, _ = call(capsys, tmp_path / "b.hilb")
    assert code == 3
    assert out.count("LOAD_ERROR  f/") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.hilb"], "no such file"),
        (["b.hilb", "--method", "tets"], "did you mean 'test'?"),
        (["b.hilb", "--timeout", "0"], "--timeout"),
        (["b.hilb", "--timeout", "nan"], "--timeout"),
        (["b.hilb", "--trusted-keys", "missing"], "cannot be read"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_verify_bad_usage_exits_with_2_and_message(twice, tmp_path, monkeypatch, capsys, arguments, message, as_json):
    twice([2, 4, 6])
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *arguments, *(["--json"] if as_json else []))
    assert code == 2
    assert message in err
    assert not as_json or json.loads(out)["exit_code"] == 2


@pytest.mark.ci
def test_verify_runs_only_trusted_bundles(twice, tmp_path, capsys):
    path = twice([2, 4, 6])
    key = Ed25519PrivateKey.generate()
    (tmp_path / "key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    (tmp_path / "key.pub").write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    code, _, err = call(capsys, path, "--trusted-keys", tmp_path / "key.pub")
    assert (code, "not signed" in err) == (2, True)
    Bundle.open(path).save(path, key=tmp_path / "key")
    code, out, _ = call(capsys, path, "--trusted-keys", tmp_path / "key.pub")
    assert (code, "signed by SHA256:" in out) == (0, True)
    code, out, _ = call(capsys, path)
    assert (code, "not checked" in out) == (0, True)


@pytest.mark.ci
def test_verify_needs_only_agent_modules(twice):
    """The controller is not imported. `python -m hil.agent verify` runs the same code."""
    block = "import sys; sys.modules['hil.controller'] = None; sys.modules['click'] = None\n"
    script = f"{block}from hil.agent import verify; sys.exit(verify.main(sys.argv[1:]))"
    path = twice([2, 4, 6])
    for command in (["-c", script], ["-m", "hil.agent", "verify"]):
        done = subprocess.run([sys.executable, *command, path], capture_output=True, text=True, env={**os.environ})
        assert (done.returncode, done.stderr) == (0, "")
        assert "1 of 1 cases passed" in done.stdout
