from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.compiling import fake_compiler

from hil.controller.backends.compilers import compile_model, iree_program
from hil.controller.backends.compilers.iree_program import choose_settings, identify_host_cpu
from hil.controller.backends.references import run_reference
from hil.controller.models.importers import import_model
from hil.controller.storage.isolation.isolated import Isolated
from hil.core.files import digest_file
from hil.core.results import Artifact
from hil.errors import CompileCrashed, CompileFailed, StageTimeout, UsageError

Save = Callable[..., Path]
FLOAT = TensorProto.FLOAT
HOST = [
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
]
ADD = """
func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = arith.addf %a, %a : tensor<4xf32>
  return %0 : tensor<4xf32>
}
"""


def build(path: Path, settings: dict[str, Any], flags: list[str] = HOST, **options: Any) -> Artifact:
    dims = options.pop("dims", {})
    model = import_model(path, dims=dims, isolated=settings["isolated"])
    return compile_model(
        model, **{"compiler": "iree", "runtime": "iree", "flags": flags, "debug_ir": None, **settings, **options}
    )


def reflection(artifact: Artifact) -> dict[str, str]:
    from iree import runtime

    module = runtime.VmModule.copy_buffer(runtime.VmInstance(), artifact.files[artifact.main].read_bytes())
    return dict(module.lookup_function(artifact.function).reflection)


def linear(save: Save, **options: Any) -> Path:
    nodes = [
        helper.make_node("MatMul", ["in put:0", "w"], ["h"], name="fc1"),
        helper.make_node("Relu", ["h"], ["out"], name="fc1"),
    ]
    weight = numpy_helper.from_array(np.ones((4, 3), np.float32), "w")
    return save(nodes, [("in put:0", FLOAT, ("N", 4))], [("out", FLOAT, ("N", 3))], [weight], **options)


@pytest.mark.ci
def test_compiled_onnx_model_preserves_names_and_dtypes(save_onnx: Save, settings: dict[str, Any]) -> None:
    artifact = build(linear(save_onnx), settings, dims={"N": 2})
    assert (artifact.runtime, artifact.main, artifact.function) == ("iree", "main.vmfb", "net")
    assert artifact.compiler.startswith("iree 3.") and not artifact.cached and artifact.seconds > 0
    assert artifact.digests == {"main.vmfb": digest_file(artifact.files["main.vmfb"])}
    declared = reflection(artifact)["iree.abi.declaration"]
    assert declared == 'sync func @"net"(%in put:0: tensor<2x4xf32>) -> (%out: tensor<2x3xf32>)'
    assert artifact.log is not None and "iree-compile" in artifact.log.read_text()


def test_second_compilation_uses_cache(save_onnx: Save, settings: dict[str, Any]) -> None:
    path = linear(save_onnx)
    first = build(path, settings)
    again = build(path, settings)
    assert again.cached and again.seconds == 0 and again.digests == first.digests and again.log == first.log
    assert not build(path, {**settings, "recompute": True}).cached
    assert not build(path, settings, [*HOST, "--iree-opt-level=O1"]).cached
    assert not build(path, settings, dims={"N": 1}).cached


@pytest.mark.ci
def test_cache_key_includes_files_named_by_flags(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "m.mlir").write_text(ADD)
    link = tmp_path / "library.bc"
    link.write_text("one")
    flags = [*HOST, f"--iree-hal-executable-object-search-path={link}"]
    build(tmp_path / "m.mlir", settings, flags)
    assert build(tmp_path / "m.mlir", settings, flags).cached
    link.write_text("two")
    assert not build(tmp_path / "m.mlir", settings, flags).cached


@pytest.mark.ci
def test_float64_stays_float64_without_demote_flag(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "m.mlir").write_text(ADD.replace("f32", "f64"))
    assert "xf64>" in reflection(build(tmp_path / "m.mlir", settings))["iree.abi.declaration"]
    narrowed = build(tmp_path / "m.mlir", settings, [*HOST, "--iree-input-demote-f64-to-f32"])
    assert "xf32>" in reflection(narrowed)["iree.abi.declaration"]


@pytest.mark.ci
def test_model_without_float64_compiles_with_default_flags(save_onnx: Save, settings: dict[str, Any]) -> None:
    # IREE lowers this padding through float64, which fails with the flag that keeps float64.
    attributes = {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1], "strides": [2, 2]}
    node = helper.make_node("MaxPool", ["x"], ["y"], **attributes)
    path = save_onnx([node], [("x", FLOAT, (1, 4, 16, 16))], [("y", FLOAT, (1, 4, 8, 8))])
    artifact = build(path, settings)
    assert artifact.flags == tuple(HOST)
    with pytest.raises(CompileFailed, match="MaxPool"):
        build(path, settings, [*HOST, iree_program.KEEP_FLOAT64])


def test_unsigned_and_bool_types_keep_signedness(save_onnx: Save, settings: dict[str, Any]) -> None:
    node = helper.make_node("Greater", ["a", "b"], ["c"])
    path = save_onnx(
        [node],
        [("a", TensorProto.UINT8, (2,)), ("b", TensorProto.UINT8, (2,))],
        [("c", TensorProto.BOOL, (2,))],
    )
    declared = reflection(build(path, settings))["iree.abi.declaration"]
    assert declared.endswith("(%a: tensor<2xui8>, %b: tensor<2xui8>) -> (%c: tensor<2xi1>)")


def test_debug_ir_contains_node_names(save_onnx: Save, settings: dict[str, Any], tmp_path: Path) -> None:
    path = linear(save_onnx)
    build(path, settings)
    build(path, settings, debug_ir=tmp_path / "ir")
    imported = (tmp_path / "ir" / "imported.mlir").read_text()
    assert 'loc("fc1")' in imported and 'loc("fc1_1")' in imported
    assert list((tmp_path / "ir" / "phases").glob("*.flow.mlir")) and list((tmp_path / "ir" / "executables").iterdir())


@pytest.mark.slow
@pytest.mark.ci
def test_compiler_accepts_old_opsets_and_model_functions(save_onnx: Save, settings: dict[str, Any]) -> None:
    old = save_onnx([helper.make_node("Relu", ["x"], ["y"])], [("x", FLOAT, (4,))], [("y", FLOAT, (4,))], opset=9)
    build(old, settings)
    double = helper.make_function(
        "mine", "Double", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    node = helper.make_node("Double", ["x"], ["y"], domain="mine")
    options: dict[str, Any] = {"functions": [double], "domains": ("mine",), "name": "f.onnx"}
    path = save_onnx([node], [("x", FLOAT, (4,))], [("y", FLOAT, (4,))], **options)
    build(path, settings)
    x = np.arange(4, dtype=np.float32)
    model = import_model(path, isolated=settings["isolated"])
    assert run_reference("iree-llvm-cpu", model, {"x": x}, **settings).outputs["y"].tolist() == (x + x).tolist()


@pytest.mark.ci
def test_compiler_accepts_model_without_inputs(save_onnx: Save, settings: dict[str, Any]) -> None:
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.float32(3)))
    many = [helper.make_node("Identity", ["c"], [f"y{i}"]) for i in range(100)]
    path = save_onnx([constant, *many], [], [(f"y{i}", FLOAT, ()) for i in range(100)])
    model = import_model(path, isolated=settings["isolated"])
    outputs = run_reference("iree-llvm-cpu", model, {}, **settings).outputs
    assert list(outputs) == [f"y{i}" for i in range(100)] and all(
        value.shape == () and value == 3 for value in outputs.values()
    )


def test_unsupported_operator_error_names_node(save_onnx: Save, settings: dict[str, Any]) -> None:
    node = helper.make_node("Frobnicate", ["x"], ["y"], name="odd", domain="com.acme")
    path = save_onnx([node], [("x", FLOAT, (4,))], [("y", FLOAT, (4,))], domains=("com.acme",))
    with pytest.raises(CompileFailed) as caught:
        build(path, settings)
    assert "onnx.Frobnicate" in caught.value.message and "'odd'" in caught.value.message
    assert settings["log"].read_text() and settings["cache"].ls() == []


def test_compiler_rejects_dtypes_missing_in_mlir(save_onnx: Save, settings: dict[str, Any]) -> None:
    path = save_onnx(
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", TensorProto.STRING, (4,))],
        [("y", TensorProto.STRING, (4,))],
    )
    with pytest.raises(CompileFailed, match="MLIR does not support string"):
        build(path, settings)


@pytest.mark.parametrize("flag", ["--no-such-flag", "--iree-opt-level=fast"])
def test_compiler_reports_invalid_flag_as_usage_error(tmp_path: Path, settings: dict[str, Any], flag: str) -> None:
    (tmp_path / "m.mlir").write_text(ADD)
    with pytest.raises(UsageError, match=flag.split("=")[0]):
        build(tmp_path / "m.mlir", settings, [flag])


ARM = [*HOST[:2], "--iree-llvmcpu-target-triple=aarch64-unknown-linux-gnu"]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("flags", "words", "hint"),
    [
        ([*ARM, "--iree-llvmcpu-target-cpu=cortexa53"], "'cortexa53' is not a recognized processor", "cortex-a53"),
        ([*HOST[:2], "--iree-llvmcpu-target-cpu=skylark"], "'skylark' is not a recognized processor", "skylake"),
        (
            [*ARM, "--iree-llvmcpu-target-cpu=cortex-a53", "--iree-llvmcpu-target-cpu-features=+nonesuch,+crc"],
            "'+nonesuch' is not a recognized feature",
            "--compile-flag",
        ),
    ],
)
def test_compiler_rejects_unknown_target(
    tmp_path: Path, settings: dict[str, Any], flags: list[str], words: str, hint: str
) -> None:
    (tmp_path / "m.mlir").write_text(ADD)
    with pytest.raises(CompileFailed) as caught:
        build(tmp_path / "m.mlir", settings, flags)
    assert words in caught.value.message and hint in caught.value.hint
    assert settings["cache"].ls() == []


@pytest.mark.ci
@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (
            "sys.stderr.write('boom'); sys.stderr.flush(); os.kill(os.getpid(), signal.SIGSEGV)",
            CompileCrashed,
            "SIGSEGV",
        ),
        ("os.kill(os.getpid(), signal.SIGABRT)", CompileCrashed, "SIGABRT"),
        ("sys.exit(248)", CompileCrashed, "exit code 248"),
        ("print('x.mlir:1:2: error: no such thing', file=sys.stderr); sys.exit(1)", CompileFailed, "no such thing"),
        ("time.sleep(600)", StageTimeout, "1 s"),
    ],
)
def test_compiler_crash_failure_and_timeout_raise_errors(
    tmp_path: Path,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    kind: type[Exception],
    words: str,
) -> None:
    (tmp_path / "m.mlir").write_text(ADD)
    model = import_model(tmp_path / "m.mlir", isolated=settings["isolated"])
    with fake_compiler(tmp_path, monkeypatch, script) as pool, pytest.raises(kind, match=words):
        compile_model(
            model,
            compiler="iree",
            runtime="iree",
            flags=HOST,
            debug_ir=None,
            **{**settings, "isolated": pool, "timeout": 1.0 if kind is StageTimeout else 60.0},
        )
    assert settings["cache"].ls() == []


def test_errors_in_extracts_messages_and_locations() -> None:
    said = (
        'loc("fc1"): error: loc("fc1"): failed to legalize operation \'torch.operator\' that was explicitly marked '
        'illegal: %0 = "torch.operator"(%arg0) <{name = "onnx.Foo"}> : () -> ()\n'
        "note: see current operation\n"
        'loc("fc2"): error: op verification failed\n'
    )
    assert iree_program.find_errors(said) == [
        "failed to legalize operation 'torch.operator' that was explicitly marked illegal (onnx.Foo) at 'fc1'",
        "op verification failed at 'fc2'",
    ]


def test_host_cpu_returns_stable_identity() -> None:
    assert len(identify_host_cpu()) > 3 and identify_host_cpu() == identify_host_cpu()


# --- without a compiler ---


def test_onnxruntime_program_uses_model_files(save_onnx: Save, settings: dict[str, Any]) -> None:
    path = linear(save_onnx)
    artifact = build(path, settings, [], compiler="none", runtime="onnxruntime")
    assert (artifact.main, dict(artifact.files)) == ("model.onnx", {"model.onnx": path})
    assert artifact.digests == {"model.onnx": digest_file(path)} and artifact.compiler == "none"


def test_vmfb_passes_through_both_compilers(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "m.vmfb").write_bytes(b"PK\x03\x04" + bytes(100))
    for compiler in ("none", "iree"):
        artifact = build(tmp_path / "m.vmfb", settings, compiler=compiler)
        assert (artifact.main, artifact.compiler, artifact.inputs) == ("m.vmfb", "none", None)


@pytest.mark.parametrize(
    ("compiler", "runtime", "words"),
    [
        ("none", "iree", "cannot load model.onnx"),
        ("iree", "onnxruntime", "requires the runtime iree, got onnxruntime"),
        ("gcc", "iree", "compiler 'gcc' not found"),
    ],
)
def test_compiler_rejects_mismatched_runtime_and_format(
    save_onnx: Save, settings: dict[str, Any], compiler: str, runtime: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        build(linear(save_onnx), settings, compiler=compiler, runtime=runtime)


# --- large models ---


def large_model(folder: Path, columns: int) -> Path:
    """y = (x @ w)[:, -1:] with a weight of 4096 x columns floats in a sparse file; only the last column is not 0."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="big"),
        helper.make_node("Slice", ["h", "start", "end", "axes"], ["y"], name="last"),
    ]
    weight = TensorProto(name="w", data_type=FLOAT, dims=[4096, columns], data_location=TensorProto.EXTERNAL)
    size = 4096 * columns * 4
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", str(size))):
        weight.external_data.add(key=key, value=value)
    with (folder / "w.bin").open("wb") as file:
        file.truncate(size)
        file.seek(size - 4)
        file.write(np.float32(3).tobytes())
    constants = [
        numpy_helper.from_array(np.array([columns - 1], np.int64), "start"),
        numpy_helper.from_array(np.array([columns], np.int64), "end"),
        numpy_helper.from_array(np.array([1], np.int64), "axes"),
    ]
    graph = helper.make_graph(
        nodes,
        "large",
        [helper.make_tensor_value_info("x", FLOAT, (1, 4096))],
        [helper.make_tensor_value_info("y", FLOAT, (1, 1))],
        initializer=[weight, *constants],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    proto.ir_version = 10
    onnx.save(proto, folder / "large.onnx")
    return folder / "large.onnx"


def check_large(folder: Path, settings: dict[str, Any], columns: int) -> None:
    path = large_model(folder, columns)
    model = import_model(path, isolated=settings["isolated"])
    assert model.inputs is not None and list(model.files) == ["large.onnx", "w.bin"]
    artifact = build(path, settings)
    assert set(artifact.files) == {"main.vmfb", "params.irpa"} == set(artifact.digests)
    assert artifact.files["main.vmfb"].stat().st_size < 1 << 20
    x = np.full((1, 4096), 2, np.float32)
    for name in ("onnxruntime", "iree-llvm-cpu"):
        assert run_reference(name, model, {"x": x}, **settings).outputs["y"].tolist() == [[6.0]]


@pytest.mark.slow
@pytest.mark.ci
def test_large_weights_go_to_parameter_file(tmp_path: Path, settings: dict[str, Any]) -> None:
    check_large(tmp_path, settings, 17 << 10)


@pytest.mark.slow
def test_model_above_two_gigabytes_compiles(tmp_path: Path, settings: dict[str, Any]) -> None:
    with Isolated(1) as pool:
        check_large(tmp_path, {**settings, "isolated": pool, "timeout": 600.0}, 130 << 10)
    # Peak of the largest finished child, in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit < 12 << 30


def test_very_long_feature_list_compiles_as_flag(save_onnx: Save, settings) -> None:
    model = import_model(linear(save_onnx), isolated=settings["isolated"])
    features = f"--iree-llvmcpu-target-cpu-features={','.join(['+avx'] * 80)}"
    assert choose_settings(model, [features]).flags[-1] == features


def test_unusable_ir_directory_raises_usage_error(save_onnx: Save, settings, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(UsageError, match=r"cannot create .*taken: File exists"):
        build(linear(save_onnx), settings, debug_ir=tmp_path / "taken")
