"""The ExecuTorch runtime on programs from stock ExecuTorch: inputs, outputs and errors."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from support.executorch_programs import Conv, Kinds, Linear, export, save_bpte, save_pte

from hil.agent.runtimes.executorch import ExecuTorchProgram, ExecuTorchRuntime
from hil.errors import LoadFailed, RunFailed

pytestmark = pytest.mark.filterwarnings("ignore")  # the exporter emits many warnings


def load(path: Path, function: str = "", device: str = "") -> ExecuTorchProgram:
    runtime = ExecuTorchRuntime({})
    runtime.prepare(device)
    return runtime.load(path.parent, path.name, device, function)


def run(program: ExecuTorchProgram, *inputs: np.ndarray) -> list[np.ndarray]:
    program.bind(list(inputs))
    program.run()
    return program.fetch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def linear(folder: Path) -> Path:
    return save_pte(folder / "linear.pte", export(Linear(), [torch.zeros(2, 4)]))


X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def test_runtime_matches_module_outputs(linear: Path):
    program = load(linear)
    assert [str(spec) for spec in program.inputs] == ["input0: 2x4 float32"]
    assert [str(spec) for spec in program.outputs] == ["output0: 2x3 float32", "output1: 2x4 float32"]
    assert program.function == "forward"
    with torch.no_grad():
        expected = Linear()(torch.from_numpy(X))
    for found, right in zip(run(program, X), expected, strict=True):
        np.testing.assert_allclose(found, right.numpy(), rtol=1e-6, atol=1e-6)


def test_runtime_copies_outputs_and_rereads_inputs(linear: Path):
    program = load(linear)
    (_, first) = run(program, X)
    kept = first.copy()
    program.run()
    np.testing.assert_array_equal(program.fetch()[1], kept)
    run(program, X * 2)
    np.testing.assert_array_equal(first, kept)


def test_runtime_drops_constant_inputs_and_non_tensor_outputs(folder: Path):
    path = save_pte(folder / "kinds.pte", export(Kinds(), [torch.zeros(2, 4), 3, 0.5, True]), portable=True)
    program = load(path)
    assert [spec.name for spec in program.inputs] == ["input0"]
    found = run(program, X)
    assert [one.dtype for one in found] == [np.float32, ml_dtypes.bfloat16, np.bool_, np.int64]
    np.testing.assert_allclose(found[0], -(X * 3 + 0.5), rtol=1e-6)
    np.testing.assert_array_equal(found[1], X.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(found[2], X > 0)


@pytest.mark.parametrize("portable", [True, False])
def test_runtime_accepts_channels_last_programs(folder: Path, portable: bool):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    last = x.to(memory_format=torch.channels_last)
    path = save_pte(folder / f"last-{portable}.pte", export(Conv(), [last]), portable=portable)
    (found,) = run(load(path), x.numpy())
    with torch.no_grad():
        np.testing.assert_allclose(found, Conv()(x).numpy(), rtol=1e-5, atol=1e-5)


def test_runtime_accepts_dynamic_shapes_up_to_bound(folder: Path):
    dim = torch.export.Dim("n", min=1, max=4)
    path = save_pte(folder / "dynamic.pte", export(Conv(), [torch.zeros(2, 3, 8, 8)], ({0: dim},)))
    program = load(path)
    for size in (1, 3, 4):
        assert run(program, np.ones((size, 3, 8, 8), np.float32))[0].shape == (size, 8, 6, 6)
    with pytest.raises(RunFailed, match="input0 is 5x3x8x8, but the program accepts at most 4x3x8x8"):
        program.bind([np.ones((5, 3, 8, 8), np.float32)])


def test_runtime_loads_program_from_bundle(folder: Path):
    given = [torch.from_numpy(X)]
    path = save_bpte(folder / "linear.bpte", export(Linear(), [torch.zeros(2, 4)]), [(given, Linear()(*given))])
    np.testing.assert_array_equal(run(load(path), X)[1], X + 1)


def test_runtime_names_missing_backend_or_operator(folder: Path, linear: Path):
    elsewhere = folder / "elsewhere.pte"
    elsewhere.write_bytes(linear.read_bytes().replace(b"XnnpackBackend", b"NowhereBackend"))
    with pytest.raises(
        LoadFailed, match="delegates to NowhereBackend, which this board's ExecuTorch does not contain"
    ) as error:
        load(elsewhere)
    assert "XnnpackBackend" in error.value.hint
    portable = save_pte(folder / "portable.pte", export(Linear(), [torch.zeros(2, 4)]), portable=True)
    unknown = folder / "unknown.pte"
    unknown.write_bytes(portable.read_bytes().replace(b"aten::relu", b"aten::rely"))
    with pytest.raises(LoadFailed, match=r"calls aten::rely\.out, which this board's ExecuTorch does not contain"):
        load(unknown)


def test_runtime_explains_load_failure(folder: Path, linear: Path):
    whole = linear.read_bytes()
    broken = folder / "broken.pte"
    for size in (0, 3, 40, len(whole) // 2, len(whole) - 8):
        broken.write_bytes(whole[:size])
        with pytest.raises(LoadFailed, match=r"broken\.pte"):
            load(broken)
    with pytest.raises(LoadFailed, match="method 'backward' not found in") as error:
        load(linear, "backward")
    assert "forward" in error.value.hint
    with pytest.raises(LoadFailed, match="unsupported ExecuTorch device 'npu'"):
        load(linear, device="npu")
