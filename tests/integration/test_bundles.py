"""`hil bundle` from model to verdict: on the simulator, on a board, and on a board without a controller."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.commands import run_hil
from support.models import DIGITS
from support.waiting import eventually

from hil.bundles import Bundle, MethodTestCase, MethodTestSuite
from hil.errors import UsageError

DIGITS_CNN = DIGITS / "digits_cnn.onnx"
TWO = """
func.func @add(%x: tensor<?x4xf32> {iree.abi.name = "x"}, %y: tensor<?x4xf32> {iree.abi.name = "y"})
    -> (tensor<?x4xf32> {iree.abi.name = "sum"}) {
  %0 = arith.addf %x, %y : tensor<?x4xf32>
  return %0 : tensor<?x4xf32>
}
func.func @twice(%x: tensor<3xi32>) -> tensor<3xi32> {
  %0 = arith.addi %x, %x : tensor<3xi32>
  return %0 : tensor<3xi32>
}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory, shared_cache) -> Path:
    """Provide digits.hilb and two.hilb with its sources, and its flag files in flags/."""
    folder = tmp_path_factory.mktemp("bundles")
    (folder / "two.mlir").write_text(TWO)
    x, y = np.ones((5, 4), np.float32), np.full((5, 4), 2, np.float32)
    np.savez(folder / "add5.npz", x=x, y=y, sum=x + y)
    given = np.arange(3, dtype=np.int32)
    np.savez(folder / "seed0.npz", arg0=given, output0=2 * given)
    for command in (
        ["create", str(DIGITS_CNN), "--cases", "3", "-o", "digits.hilb"],
        ["create", "two.mlir", "--case", "add=add5.npz", "--case", "twice=seed0.npz", "-o", "two.hilb"],
        ["export", "two.hilb", "flags", "--to", "flagfile"],
    ):
        ended = run_hil(["bundle", *command], {**os.environ, "HIL_CACHE_DIR": str(shared_cache)}, folder)
        assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def digits(made: Path) -> Path:
    return made / "digits.hilb"


@pytest.fixture
def two(made: Path) -> Path:
    """Save a module of two functions; one has a dynamic dimension."""
    return made / "two.mlir"


@pytest.fixture
def flags(made: Path, tmp_path: Path) -> Path:
    """Export the two functions with a case each as flag files."""
    return Path(shutil.copytree(made / "flags", tmp_path / "flags"))


def outcomes(document: dict) -> list[str]:
    return [case["outcome"] for case in document["cases"]]


def corrupt(folder: Path, output: str) -> None:
    array = np.load(folder / output)
    array.flat[3] += 1
    np.save(folder / output, array)


@pytest.mark.daily
def test_bundle_run_passes_bundle_of_model(hil, digits):
    document = hil("bundle", "inspect", digits, "--json").document
    (method,) = document["methods"]
    assert [case["name"] for case in method["cases"]] == ["seed0", "seed1", "seed2"]
    assert all(case["source"].startswith("onnxruntime ") for case in method["cases"])
    assert document["made"]["model"]["name"] == "digits_cnn.onnx"
    ended = hil("bundle", "run", digits)
    assert ended.code == 0, ended.err
    assert "3 of 3 cases passed on sim" in ended.out
    stored = hil("runs", "show", "latest", "--json").document
    assert outcomes(stored) == ["PASS"] * 3
    assert stored["cases"][0]["model"]["digest"] == document["digest"]
    # The cases share a session: only the first sends and loads the program.
    assert [case["timings"]["load_s"] is not None for case in stored["cases"]] == [True, False, False]


def test_bundle_create_reproduces_identical_file(hil, digits, tmp_path):
    assert hil("bundle", "create", DIGITS_CNN, "--cases", 3, "-o", "again.hilb").code == 0
    assert (tmp_path / "again.hilb").read_bytes() == digits.read_bytes()


def test_bundle_run_selects_method(hil, made):
    document = hil("bundle", "run", made / "two.hilb", "--json").document
    assert [(case["name"], case["outcome"]) for case in document["cases"]] == [
        ("add-add5", "PASS"),
        ("twice-seed0", "PASS"),
    ]
    document = hil("bundle", "run", made / "two.hilb", "--method", "twice", "--json").document
    assert [case["name"] for case in document["cases"]] == ["twice-seed0"]


def test_bundle_create_rejects_mismatched_cases(hil, two, tmp_path):
    np.savez(tmp_path / "f64.npz", x=np.ones((2, 4)), y=np.ones((2, 4), np.float32))
    for options, message in {
        ("--case", "add=f64.npz"): "method 'add', case 'f64', input 'x' is 2x4 float64",
        ("--input", "x=2x4xf32=1"): "require a single method",
    }.items():
        ended = hil("bundle", "create", two, *options, "-o", "out.hilb")
        assert ended.code == 2, ended.out
        assert message in ended.err
    assert not (tmp_path / "out.hilb").exists()


def test_bundle_create_reads_signature_of_compiled_program(hil, made, tmp_path):
    case = made / "add5.npz"
    ended = hil("bundle", "create", made / "flags" / "main.vmfb", "--case", f"add={case}", "--cases", 0, "-o", "b.hilb")
    assert ended.code == 0, ended.err
    ended = hil("bundle", "run", "b.hilb")
    assert ended.code == 0 and "1 of 2 methods has no case: twice" in ended.err
    (method, other) = Bundle.open(tmp_path / "b.hilb").methods
    assert str(method.signature.inputs[1]) == "y: ?x4 float32" and other.name == "twice"


def test_bundle_run_limits_crash_to_case_or_method(hil, digits):
    ended = hil("bundle", "run", digits, "--fault", "crash:times=1", "--json")
    assert (ended.code, outcomes(ended.document)) == (3, ["RUN_CRASH", "PASS", "PASS"])
    ended = hil("bundle", "run", digits, "--fault", "crash:at=load,times=1", "--json")
    assert (ended.code, outcomes(ended.document)) == (3, ["RUN_CRASH"] * 3)


@pytest.mark.slow
def test_bundle_run_starts_new_simulator_after_board_loss(hil, digits):
    ended = hil("bundle", "run", digits, "--fault", "kill-agent:times=1", "--json")
    assert ended.code == 4
    assert outcomes(ended.document) == ["BOARD_LOST"] * 3, "another simulator has faults of its own"


def test_bundle_run_stores_record_on_interrupt(digits, environment, tmp_path):
    command = [sys.executable, "-m", "hil.controller.cli.main", "bundle", "run", digits, "--fault", "hang", "--json"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    eventually(lambda: list(tmp_path.glob("hil-runs/*/*/inputs/*.npy")), process=process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(out)["error"]["kind"] == "Interrupted"
    (record,) = tmp_path.glob("hil-runs/*/run.json")
    assert json.loads(record.read_text())["exit_code"] == 130


def test_bundle_run_rejects_damaged_bundle_before_board(hil, digits, tmp_path):
    raw = digits.read_bytes()
    at = raw.index(b"main.vmfb")
    for name, data in {
        "cut.hilb": raw[:-1],
        "escaping.hilb": raw[:at] + b"../x.vmfb" + raw[at + 9 :],
        "zip.hilb": b"PK\x03\x04" + b"\0" * 5000,
    }.items():
        (tmp_path / name).write_bytes(data)
        ended = hil("bundle", "run", name, "--board", "unix:/nowhere.sock")
        assert ended.code == 2, (name, ended.out, ended.err)
        assert name in ended.err
    assert hil("bundle", "verify", "cut.hilb").code == 2
    assert not (tmp_path / "hil-runs").exists()


def test_bundle_export_rejects_existing_directory(hil, digits, tmp_path):
    assert hil("bundle", "export", digits, "golden", "--to", "golden").code == 0
    assert hil("bundle", "export", digits, "golden", "--to", "golden").code == 2
    assert hil("bundle", "import", "golden", "--from", "golden", "-o", "back.hilb").code == 0
    assert (tmp_path / "back.hilb").read_bytes() == digits.read_bytes()


def test_flagfile_import_matches_iree_run_module(hil, flags, tmp_path):
    def stock(name: str) -> int:
        tool = Path(sys.executable).parent / "iree-run-module"
        return subprocess.run([tool, f"--flagfile={name}.flagfile"], cwd=flags, capture_output=True).returncode

    assert [stock("add-add5"), stock("twice-seed0")] == [0, 0]
    corrupt(flags, "add-add5/output_0.npy")
    assert stock("add-add5") != 0
    assert hil("bundle", "import", "flags", "--from", "flagfile", "-o", "wrong.hilb").code == 0
    ended = hil("bundle", "run", "wrong.hilb")
    assert ended.code == 1
    assert "1 of 2 cases passed" in ended.out
    assert "1 of 20" in ended.out and "worst at [0, 3]: 3, the reference has 4" in ended.out


HALF = """
func.func @f(%x: tensor<3xf16>, %i: tensor<2xi32>) -> (tensor<3xf16>, tensor<2xi32>) {
  %0 = arith.addf %x, %x : tensor<3xf16>
  %1 = arith.addi %i, %i : tensor<2xi32>
  return %0, %1 : tensor<3xf16>, tensor<2xi32>
}
"""


@pytest.mark.slow
def test_flagfile_defaults_match_iree_tolerances(hil, tmp_path):
    (tmp_path / "half.mlir").write_text(HALF)
    x, i = np.ones(3, np.float16), np.ones(2, np.int32)
    np.savez(tmp_path / "seed0.npz", arg0=x, arg1=i, output0=x + x, output1=i + i)
    assert hil("bundle", "create", "half.mlir", "--case", "seed0.npz", "-o", "half.hilb").code == 0
    assert hil("bundle", "export", "half.hilb", "flags", "--to", "flagfile").code == 0
    head = ["--module=main.vmfb", "--function=f", "--input=3xf16=50 1 1", "--input=2xi32=1000000 1"]
    tool = Path(sys.executable).parent / "iree-run-module"
    (tmp_path / "flags" / "seed0.flagfile").unlink()
    file = tmp_path / "flags" / "a.flagfile"
    for halves, integers, code in [
        ("100 2 2", "2000000 2", 0),
        ("100.0625 2 2", "2000000 2", 1),
        ("100 2 2", "2000001 2", 1),
    ]:
        file.write_text("\n".join([*head, f"--expected_output=3xf16={halves}", f"--expected_output=2xi32={integers}"]))
        assert subprocess.run([tool, "--flagfile=a.flagfile"], cwd=file.parent, capture_output=True).returncode == code
        assert hil("bundle", "import", "flags", "--from", "flagfile", "-o", "a.hilb").code == 0
        assert hil("bundle", "run", "a.hilb").code == code
    # Flag files can express a tolerance that keeps integers exact.
    assert hil("bundle", "export", "a.hilb", "again", "--to", "flagfile").code == 0


def test_bundle_case_may_share_program_file_name(hil, digits, tmp_path):
    (tmp_path / "program").mkdir()
    opened = Bundle.open(digits)
    program, (method,) = opened.extract(tmp_path / "program"), opened.methods
    case = MethodTestCase(method.cases[0].inputs, method.cases[0].expected_outputs, name=program.main)
    Bundle.create(program, [MethodTestSuite(method.name, [case])]).save(tmp_path / "a.hilb")
    assert hil("bundle", "export", "a.hilb", "out", "--to", "flagfile").code == 0
    assert hil("bundle", "import", "out", "--from", "flagfile", "-o", "b.hilb").code == 0


def test_onnx_test_data_round_trips(hil, digits, tmp_path):
    assert hil("bundle", "create", DIGITS_CNN, "--runtime", "onnxruntime", "--cases", 2, "-o", "a.hilb").code == 0
    assert hil("bundle", "export", "a.hilb", "out", "--to", "onnx").code == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["model.onnx", "test_data_set_0", "test_data_set_1"]
    onnx.checker.check_model(tmp_path / "out" / "model.onnx")
    assert hil("bundle", "import", "out", "--from", "onnx", "-o", "b.hilb").code == 0
    assert hil("bundle", "run", "b.hilb").code == 0
    one, other = (Bundle.open(tmp_path / name).methods[0].cases for name in ("a.hilb", "b.hilb"))
    assert [case.inputs["image"].tolist() for case in one] == [case.inputs["image"].tolist() for case in other]
    ended = hil("bundle", "export", digits, "no", "--to", "onnx")
    assert ended.code == 2 and "expected an ONNX model" in ended.err


def test_agent_runs_only_bundles_signed_by_trusted_keys(hil, two, start_agent, tmp_path):
    for name in ("mine", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    address = start_agent("--trusted-keys", str(tmp_path / "mine.pub"))
    options = ("bundle", "create", two, "--function", "twice", "--case", two.parent / "seed0.npz")
    for name in ("mine", "other"):
        assert hil(*options, "--sign", name, "-o", f"{name}.hilb").code == 0
    assert hil("bundle", "run", "mine.hilb", "--board", address).code == 0
    for path in ("other.hilb", two.parent / "two.hilb"):
        ended = hil("bundle", "run", path, "--board", address, "--json")
        assert ended.code == 3
        assert set(outcomes(ended.document)) == {"LOAD_ERROR"}
        assert "programs of signed bundles" in ended.document["cases"][0]["reason"]
    given = ("--input", "3xi32=0 1 2", "--expected", "3xi32=0 2 4")
    ended = hil("run", two, "--function", "twice", *given, "--board", address, "--runtime-hw-type", "sim")
    assert ended.code == 3 and "programs of signed bundles" in ended.out
    assert hil("bundle", "run", "mine.hilb", "--key", "other.pub").code == 2


def test_agent_verify_limits_crash_to_case(tmp_path):
    """Use a vendor runtime that aborts on 0, registered as a package."""
    (tmp_path / "vendor.py").write_text(VENDOR)
    info = tmp_path / "vendor-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[hil.runtimes]\nvendor = vendor:Runtime\n")
    make_vendor_bundle(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "hil.agent", "verify", "v.hilb", "--timeout", "60"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if " f/" in line] == ["PASS", "RUN_CRASH", "PASS"]
    assert "SIGABRT" in done.stdout


VENDOR = """
import os
import numpy as np
from hil.core.tensors import TensorSpec

class Runtime:
    def __init__(self, options): pass
    @staticmethod
    def describe(): return {"version": "1", "devices": ["only"]}
    def prepare(self, device): pass
    def load(self, folder, main, device, function): return Program()

class Program:
    inputs = outputs = (TensorSpec("x", "int32", (1,)),)
    function = "f"
    def bind(self, inputs): self.given = inputs[0]
    def run(self):
        if not self.given.any(): os.abort()
    def fetch(self): return [np.array(self.given)]
"""


def make_vendor_bundle(folder: Path) -> None:
    from hil.bundles import MethodTestCase, MethodTestSuite
    from hil.core.results import Artifact
    from hil.core.tensors import TensorSpec

    (folder / "p.bin").write_bytes(b"p")
    spec = TensorSpec("x", "int32", (1,))
    program = Artifact("vendor", "p.bin", {"p.bin": folder / "p.bin"}, {}, "f", "none", (), (spec,), (spec,))
    cases = [MethodTestCase([value], [value]) for value in (np.array([n], np.int32) for n in (1, 0, 2))]
    Bundle.create(program, [MethodTestSuite("f", cases)]).save(folder / "v.hilb")


@pytest.mark.board
@pytest.mark.slow  # two minutes on an emulated CPU
def test_board_verifies_bundle_without_controller(hil, board_aarch64, tmp_path):
    """The agent is already deployed. The test sends only a file and a command to the board."""
    board = board_aarch64
    where = ["--board", f"root@{board.ip}", "--identity", board.identity, "--known-hosts", board.known_hosts]
    ended = hil("bundle", "create", DIGITS_CNN, *where, "--cases", 2, "-o", "arm.hilb")
    assert ended.code == 0, ended.err
    assert "compiling for aarch64" in ended.err
    ended = hil("bundle", "run", "arm.hilb", *where, "--json")
    assert ended.code == 0, ended.err
    assert outcomes(ended.document) == ["PASS", "PASS"]
    assert ended.document["board"]["info"]["machine"]["arch"] == "aarch64"
    verify = on_the_board(board)
    good = (tmp_path / "arm.hilb").read_bytes()
    done = verify(good)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 cases passed" in done.stdout and "(aarch64)" in done.stdout
    assert verify(good[:-1]).returncode == 2
    opened = Bundle.open(tmp_path / "arm.hilb")
    (case, *_) = opened.methods[0].cases
    wrong = good.replace(case.expected_outputs["logits"].tobytes(), b"\x01" * 40)
    assert verify(wrong).returncode == 2, "its digest tells"
    with pytest.raises(UsageError):
        (tmp_path / "wrong.hilb").write_bytes(wrong)
        Bundle.open(tmp_path / "wrong.hilb")
    assert hil("bundle", "export", "arm.hilb", "golden", "--to", "golden").code == 0
    (output,) = (tmp_path / "golden").glob("*/0-seed0/output_0.npy")
    corrupt(output.parent, output.name)
    assert hil("bundle", "import", "golden", "--from", "golden", "-o", "failing.hilb").code == 0
    done = verify((tmp_path / "failing.hilb").read_bytes())
    assert done.returncode == 1
    assert "1 of 10 out of tolerance" in done.stdout and "1 of 2 cases passed" in done.stdout


@pytest.mark.board
def test_command_board_runs_bundle(hil, board_x86, made, tmp_path):
    board = board_x86
    where = ["--board", f"root@{board.ip}", "--identity", board.identity, "--known-hosts", board.known_hosts]
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    shutil.copytree(made / "flags", tmp_path / "flags")
    assert hil("bundle", "import", "flags", "--from", "flagfile", "--sign", "key", "-o", "b.hilb").code == 0
    ended = hil("bundle", "run", "b.hilb", *where, "--runtime-hw-type", "command", "--json")
    assert ended.code == 0, ended.err + ended.out
    assert outcomes(ended.document) == ["PASS", "PASS"]
    assert "command" in ended.document["cases"][0]["provenance"]
    corrupt(tmp_path / "flags", "add-add5/output_0.npy")
    assert hil("bundle", "import", "flags", "--from", "flagfile", "-o", "wrong.hilb").code == 0
    ended = hil("bundle", "run", "wrong.hilb", *where, "--runtime-hw-type", "command", "--json")
    assert (ended.code, outcomes(ended.document)) == (1, ["FAIL", "PASS"])


def on_the_board(board) -> Callable[[bytes], subprocess.CompletedProcess[str]]:
    """Return a function that copies a file to a board over SSH and verifies it with the agent's Python."""
    ssh = ["ssh", "-i", board.identity, "-o", f"UserKnownHostsFile={board.known_hosts}", f"root@{board.ip}"]
    script = (
        "cd .hil; agent=agents/$(cat agents/current); "
        "for one in $(sed -n 's/^packages\\t//p' $agent); do path=$path:$HOME/.hil/packages/$one; done; "
        "PYTHONPATH=$path python3 -m hil.agent verify $HOME/board.hilb"
    )

    def verify(data: bytes) -> subprocess.CompletedProcess[str]:
        subprocess.run([*ssh, "cat > board.hilb"], input=data, check=True)
        return subprocess.run([*ssh, script], capture_output=True, text=True, timeout=120)

    return verify
