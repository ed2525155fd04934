from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.compiling import fake_compiler
from support.waiting import eventually

from hil.controller.backends.compilers import compile_model
from hil.controller.backends.compilers.iree_group import Together, compile_together
from hil.controller.backends.compilers.iree_program import KEEP_FLOAT64
from hil.controller.backends.references import run_reference
from hil.controller.models.flows.flow_registry import load_flow
from hil.controller.models.importers import import_model
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.suites.cases.operators import make_operator_cases
from hil.controller.workloads.suites.cases.spec import CaseSpec
from hil.core.results import Artifact, Model
from hil.core.tensors import Array
from hil.errors import CompileFailed, HilError, StageError

pytestmark = pytest.mark.ci

Save = Callable[..., Path]
HOST = [
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
]
# IREE's program of it reads out of bounds: each time another answer.
UNSTEADY = ("gridsample_zeros_padding",)
DTYPES = (TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8, TensorProto.FLOAT16)
# Operators that IREE supports, that it rejects in early or late passes, and one that crashes it.
NODES = """
add argmax_default_axis_example averagepool_2d_default basic_conv_with_padding bitcast_2d_float32_to_int32 mvn
cast_DOUBLE_to_FLOAT16 cast_FLOAT8E4M3FN_to_FLOAT16 concat_1d_axis_0 gemm_all_attributes hardswish relu slice sce_mean
layer_normalization_2d_axis0 matmul_2d reshape_allowzero_reordered scan9_sum softmax_axis_1 string_concat
transpose_default where_long_example
""".split()


def elementwise(save: Save, number: int, dtype: int = TensorProto.FLOAT, op: str = "Add") -> Path:
    """y = x op x; of every number another shape."""
    shape = ("N", number + 2)
    node = helper.make_node(op, ["x", "x"], ["y"], name="same name")
    return save([node], [("x", dtype, shape)], [("y", dtype, shape)], name=f"m{number}.onnx")


def imported(paths: Sequence[Path], settings: dict[str, Any]) -> list[Model]:
    return [import_model(path, isolated=settings["isolated"]) for path in paths]


def together(models: Sequence[Model], settings: dict[str, Any], flags: Sequence[str] = HOST, **more: Any) -> Together:
    chosen = {name: value for name, value in settings.items() if name != "log"} | more
    return compile_together(models, flags=flags, log_folder=settings["log"].parent / "groups", **chosen)


def alone(model: Model, settings: dict[str, Any], flags: Sequence[str] = HOST) -> Artifact:
    return compile_model(model, compiler="iree", runtime="iree", flags=flags, debug_ir=None, **settings)


def runs_of_the_compiler(settings: dict[str, Any]) -> int:
    logs = (settings["log"].parent / "groups").iterdir()
    return sum(line.startswith("$ ") for log in logs for line in log.read_text(errors="replace").splitlines())


def test_grouped_models_are_cached_and_match_single_builds(
    save_onnx: Save, settings: dict[str, Any], tmp_path: Path
) -> None:
    models = imported([elementwise(save_onnx, number, dtype) for number, dtype in enumerate(DTYPES)], settings)
    result = together(models, settings)
    assert set(map(id, result.compiled)) == set(map(id, models)) and (result.cached, result.alone) == ((), ())
    assert result.programs == runs_of_the_compiler(settings) == 2
    by_themselves = {**settings, "cache": Cache(tmp_path / "other")}
    digests, inodes = set(), set()
    for number, model in enumerate(models):
        artifact = alone(model, settings)
        main = artifact.files[artifact.main]
        assert artifact.cached and artifact.function == f"net.{number}"
        digests.add(artifact.digests["main.vmfb"])
        inodes.add(main.stat().st_ino)
        assert artifact.log is not None and f"m{number} as net.{number}" in artifact.log.read_text()
        assert model.inputs is not None
        x = {"x": np.arange(3 * (number + 2)).reshape(3, number + 2).astype(model.inputs[0].dtype)}
        mine, theirs = (
            run_reference("iree-llvm-cpu", model, x, **one).outputs["y"] for one in (settings, by_themselves)
        )
        assert mine.dtype == theirs.dtype == x["x"].dtype
        np.testing.assert_array_equal(mine, theirs)
    assert len(digests) == len(inodes) == 2
    assert together(models, settings) == Together(cached=tuple(models))


def test_group_contains_models_with_equal_flags(save_onnx: Save, settings: dict[str, Any]) -> None:
    dtypes = (TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT) * 2
    models = imported([elementwise(save_onnx, number, dtype) for number, dtype in enumerate(dtypes)], settings)
    result = together(models, settings)
    assert len(result.compiled) == len(models)
    flags = [alone(model, settings).flags for model in models]
    assert [KEEP_FLOAT64 in one for one in flags] == [dtype == TensorProto.DOUBLE for dtype in dtypes]


@pytest.mark.slow
def test_shared_program_serves_only_callers_asking_for_groups(save_onnx: Save, settings: dict[str, Any]) -> None:
    models = imported([elementwise(save_onnx, number) for number in range(4)], settings)
    together(models, settings)
    shared = alone(models[0], settings)
    somebody_else = {**settings, "cache": Cache(settings["cache"].root)}
    own = alone(models[0], somebody_else)
    assert (shared.function, own.function) == ("net.0", "net") and not own.cached
    assert shared.digests != own.digests
    # A program compiled separately is also used by group compilation.
    again = {**settings, "cache": Cache(settings["cache"].root)}
    together(models, again)
    assert alone(models[0], again).function == "net" and alone(models[1], again).function == "net.1"


@pytest.mark.slow
def test_group_excludes_large_external_and_mlir_models(
    save_onnx: Save, settings: dict[str, Any], tmp_path: Path
) -> None:
    small = [elementwise(save_onnx, number) for number in range(3)]
    weight = numpy_helper.from_array(np.ones((600, 600), np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    values = ([("x", TensorProto.FLOAT, (1, 600))], [("y", TensorProto.FLOAT, (1, 600))])
    large = save_onnx(nodes, *values, [weight], name="large.onnx")
    external = tmp_path / "external.onnx"
    onnx.save(onnx.load(large), external, save_as_external_data=True, location="w.bin")
    odd = save_onnx(
        [helper.make_node("Relu", ["x"], ["y"])],
        [("x", TensorProto.FLOAT, (2,))],
        [("y", TensorProto.FLOAT, (2,))],
        graph="a graph's name",
        name="odd.onnx",
    )
    text = tmp_path / "m.mlir"
    text.write_text("func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> }")
    models = imported([*small, large, external, odd, text], settings)
    result = together(models, settings)
    assert {model.name for model in result.compiled} == {"m0", "m1", "m2"}
    assert {model.name for model in result.alone} == {"large", "external", "odd", "m"}


def test_group_smaller_than_worker_count_compiles_separately(save_onnx: Save, settings: dict[str, Any]) -> None:
    models = imported([elementwise(save_onnx, number) for number in range(2)], settings)
    assert together(models, settings) == Together(alone=tuple(models)) and settings["cache"].ls() == []


def test_group_compiles_equal_content_once(save_onnx: Save, settings: dict[str, Any]) -> None:
    paths = [elementwise(save_onnx, number) for number in range(3)]
    copies = [path.with_name(f"copy-of-{path.name}") for path in paths]
    for path, copy in zip(paths, copies, strict=True):
        shutil.copyfile(path, copy)
    models = imported([*paths, *copies], settings)
    assert {model.name for model in together(models, settings).compiled} == {"m0", "m1", "m2"}
    assert all(alone(model, settings).cached for model in models)


@pytest.mark.slow
def test_group_preserves_functions_of_importer_separate(save_onnx: Save, settings: dict[str, Any]) -> None:
    def normalised(number: int) -> Path:
        node = helper.make_node("MeanVarianceNormalization", ["x"], ["y"], axes=[number % 2])
        values = ([("x", TensorProto.FLOAT, (3, 4))], [("y", TensorProto.FLOAT, (3, 4))])
        return save_onnx([node], *values, name=f"mvn{number}.onnx", graph=f"net{number}")

    models = imported([normalised(number) for number in range(4)], settings)
    assert len(together(models, settings).compiled) == 4
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    for number, model in enumerate(models):
        axis = number % 2
        expected = (x - x.mean(axis, keepdims=True)) / x.std(axis, keepdims=True)
        got = run_reference("iree-llvm-cpu", model, {"x": x}, **settings).outputs["y"]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


# --- failures of a group ---


def outcome(model: Model, settings: dict[str, Any]) -> str:
    try:
        return f"compiled to {len(alone(model, settings).files)} file"
    except StageError as error:
        return f"{error.outcome}: {error.message} ({error.hint})"


@pytest.fixture(scope="module")
def node_tests(isolated: Isolated, shared_cache: Path) -> dict[str, CaseSpec]:
    """The tests of operators in the installed onnx, by name."""
    context = RunContext(Cache(shared_cache), isolated)
    return {case.id: case for case in make_operator_cases(load_flow("iree"), context)}


def compare_outcomes(tests: Sequence[CaseSpec], settings: dict[str, Any], folder: Path) -> list[str]:
    """Compile node tests in groups; assert the same outcomes and outputs as separate builds. Return the outcomes."""
    models, values = [], []
    for test in tests:
        place = folder / test.id
        place.mkdir()
        data = test.make(place)
        try:
            path = data.path.rename(folder / f"{test.id}.onnx")
            models.append(import_model(path, isolated=settings["isolated"]))
            values.append(data.inputs)
        except HilError:
            continue  # a sequence or an optional: hil takes tensors only
    result = together(models, settings)
    assert len(result.compiled) + len(result.alone) == len(models) and not result.cached
    others = {**settings, "cache": Cache(folder / "alone")}

    def check(model: Model, inputs: Mapping[str, Array]) -> str:
        mine, theirs = ({**one, "log": folder / f"{model.name}-{at}.log"} for at, one in enumerate((settings, others)))
        grouped = model in result.compiled
        assert not grouped or alone(model, mine).cached, model.name
        said, expected = outcome(model, mine), outcome(model, theirs)
        assert said == expected, model.name
        if grouped and model.name not in UNSTEADY:
            answers = [_answer(model, inputs, one) for one in (mine, theirs)]
            assert answers[0] == answers[1], model.name
        return said

    with ThreadPoolExecutor(settings["isolated"].workers) as pool:
        return list(pool.map(check, models, values))


def _answer(model: Model, inputs: Mapping[str, Array], settings: dict[str, Any]) -> Any:
    try:
        outputs = run_reference("iree-llvm-cpu", model, inputs, **settings).outputs
    except StageError as error:
        return type(error).__name__
    return {name: (str(value.dtype), value.shape, value.tobytes()) for name, value in outputs.items()}


@pytest.mark.slow
def test_group_outcomes_do_not_depend_on_neighbours(
    node_tests: dict[str, CaseSpec], settings: dict[str, Any], tmp_path: Path
) -> None:
    seen = compare_outcomes([node_tests[name] for name in NODES], settings, tmp_path)
    kinds = {said.split(":")[0] for said in seen}
    assert kinds == {"compiled to 1 file", "COMPILE_ERROR", "COMPILE_CRASH"}
    assert sum(said.startswith("compiled") for said in seen) >= 12


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_group_outcomes_of_node_tests_match_single_builds(
    node_tests: dict[str, CaseSpec], settings: dict[str, Any], tmp_path: Path
) -> None:
    tests = random.Random(0).sample(list(node_tests.values()), 300)
    with Isolated() as pool:
        seen = compare_outcomes(tests, {**settings, "isolated": pool}, tmp_path)
    assert len({said.split(":")[0] for said in seen}) >= 2


@pytest.mark.slow
def test_group_drops_model_named_in_errors(save_onnx: Save, settings: dict[str, Any]) -> None:
    odd = helper.make_node("Frobnicate", ["x"], ["y"], name="odd", domain="com.acme")
    values = ([("x", TensorProto.FLOAT, (4,))], [("y", TensorProto.FLOAT, (4,))])
    broken = save_onnx([odd], *values, domains=("com.acme",), name="broken.onnx")
    models = imported([*(elementwise(save_onnx, number) for number in range(5)), broken], settings)
    result = together(models, settings)
    assert result.alone == (models[5],) and result.programs == 2
    assert runs_of_the_compiler(settings) == 3
    with pytest.raises(CompileFailed, match="at 'odd'"):
        alone(models[5], settings)


@pytest.mark.slow
def test_group_separates_models_with_float64(save_onnx: Save, settings: dict[str, Any]) -> None:
    paths = [
        elementwise(save_onnx, 10 * dtype + number, dtype)
        for dtype in (TensorProto.FLOAT, TensorProto.DOUBLE)
        for number in range(3)
    ]
    models = imported(paths, settings)
    assert together(models, settings).programs == 2
    flags = [alone(model, settings).flags for model in models]
    assert flags == [tuple(HOST)] * 3 + [(KEEP_FLOAT64, *HOST)] * 3


@pytest.mark.parametrize("flag", ["--iree-llvmcpu-target-cpu=skylark", "--no-such-flag"])
def test_group_stops_early_for_errors_of_every_model(save_onnx: Save, settings: dict[str, Any], flag: str) -> None:
    models = imported([elementwise(save_onnx, number) for number in range(8)], settings)
    flags = [*HOST[:2], flag]
    result = together(models, settings, flags)
    assert set(map(id, result.alone)) == set(map(id, models)) and not result.compiled
    assert runs_of_the_compiler(settings) <= 3
    with pytest.raises(HilError, match=flag.split("=")[-1]):
        alone(models[0], settings, flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", id="the compiler dies"),
        pytest.param("os.kill(os.getppid(), signal.SIGKILL)", id="the worker dies"),
        pytest.param("print('error: what?', file=sys.stderr); sys.exit(1)", id="an error that names nobody"),
        pytest.param("time.sleep(600)", id="the compiler hangs"),
    ],
)
def test_group_falls_back_to_separate_builds(
    save_onnx: Save, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    models = imported([elementwise(save_onnx, number) for number in range(4)], settings)
    with fake_compiler(tmp_path, monkeypatch, script) as pool:
        result = together(models, settings, isolated=pool, timeout=3.0 if "sleep" in script else 60.0)
    assert {model.name for model in result.alone} == {"m0", "m1", "m2", "m3"} and not result.compiled
    assert settings["cache"].ls() == [] and not list(settings["cache"].root.glob("making-*/*/*"))


def test_ctrl_c_stops_group_compilers(
    save_onnx: Save, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = imported([elementwise(save_onnx, number) for number in range(4)], settings)
    pid = tmp_path / "pid"
    script = f"open({str(pid)!r} + '.tmp', 'w').write(str(os.getpid())); os.rename({str(pid)!r} + '.tmp', {str(pid)!r})"

    def interrupt() -> None:
        eventually(pid.exists)
        os.kill(os.getpid(), signal.SIGINT)

    with fake_compiler(tmp_path, monkeypatch, f"{script}; time.sleep(600)") as pool:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            together(models, settings, isolated=pool)
    eventually(lambda: not Path(f"/proc/{pid.read_text()}").exists())
    assert not list(settings["cache"].root.glob("making-*/*/*"))


# --- the cache ---


@pytest.mark.slow
def test_recompute_rebuilds_group_once(save_onnx: Save, settings: dict[str, Any]) -> None:
    models = imported([elementwise(save_onnx, number) for number in range(3)], settings)
    first = [alone(model, settings) for model in models]
    anew = {**settings, "recompute": True}
    assert len(together(models, anew).compiled) == 3
    again = [alone(model, anew) for model in models]
    assert all(artifact.cached for artifact in again)
    assert [artifact.function for artifact in first] == ["net"] * 3
    assert [artifact.function for artifact in again] == ["net.0", "net.1", "net.2"]


@pytest.mark.slow
@pytest.mark.parametrize("links", [True, False])
def test_evicting_grouped_program_leaves_others_cached(
    save_onnx: Save, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:

        def refuse(*_: Any) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)
    models = imported([elementwise(save_onnx, number) for number in range(3)], settings)
    together(models, settings)
    artifacts = [alone(model, settings) for model in models]
    assert {artifact.files["main.vmfb"].stat().st_nlink for artifact in artifacts} == {3 if links else 1}
    shutil.rmtree(artifacts[0].files["main.vmfb"].parent)
    assert [alone(model, settings).cached for model in models] == [False, True, True]
    assert alone(models[0], settings).function == "net"
