from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.models.importers import import_model
from hil.controller.models.importers.mlir import describe
from hil.controller.storage.isolation.isolated import Isolated
from hil.core.tensors import TensorSpec
from hil.errors import ImportFailed, UsageError

ADD = """
func.func @main(%arg0: tensor<2x?xf32>, %arg1: tensor<2x?xf32>) -> tensor<2x?xf32> {
  %0 = arith.addf %arg0, %arg1 : tensor<2x?xf32>
  return %0 : tensor<2x?xf32>
}
func.func private @helper(%arg0: i32) -> i32 { return %arg0 : i32 }
"""
STABLEHLO = """
module {
  func.func public @main(%arg0: tensor<4xbf16> {iree.abi.name = "left"}, %arg1: tensor<4xbf16>)
      -> (tensor<4xbf16> {iree.abi.name = "sum"}) {
    %0 = stablehlo.add %arg0, %arg1 : tensor<4xbf16>
    return %0 : tensor<4xbf16>
  }
}
"""
TWO = """
func.func @f(%arg0: tensor<f64>) -> tensor<f64> { return %arg0 : tensor<f64> }
func.func @g(%arg0: i64, %arg1: tensor<3xcomplex<f32>>) -> tensor<3xcomplex<f32>> {
  return %arg1 : tensor<3xcomplex<f32>>
}
"""


def write(folder: Path, text: str, name: str = "model.mlir") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def bytecode(text: str) -> bytes:
    import io

    from iree.compiler import ir

    file = io.BytesIO()
    ir.Module.parse(text, context=ir.Context()).operation.write_bytecode(file)
    return file.getvalue()


def test_import_reads_signature_of_public_function(tmp_path: Path, isolated: Isolated) -> None:
    model = import_model(write(tmp_path, ADD), isolated=isolated)
    assert model.function == "main" and model.format == "mlir"
    assert model.inputs == (
        TensorSpec("arg0", "float32", (2, "arg0.dim1")),
        TensorSpec("arg1", "float32", (2, "arg1.dim1")),
    )
    assert model.outputs == (TensorSpec("output0", "float32", (2, None)),)


def test_import_fixes_dynamic_dimensions(tmp_path: Path, isolated: Isolated) -> None:
    path = write(tmp_path, ADD)
    model = import_model(path, dims={"arg0.dim1": 3, "arg1.dim1": 3}, isolated=isolated)
    assert [spec.shape for spec in model.inputs or ()] == [(2, 3), (2, 3)]
    with pytest.raises(UsageError, match="no dimension 'N'") as caught:
        import_model(path, dims={"N": 3}, isolated=isolated)
    assert "arg0.dim1" in caught.value.hint


def test_import_preserves_names_of_module(tmp_path: Path, isolated: Isolated) -> None:
    model = import_model(write(tmp_path, STABLEHLO, "m.stablehlo"), isolated=isolated)
    assert [spec.name for spec in model.inputs or ()] == ["left", "arg1"]
    assert model.outputs == (TensorSpec("sum", "bfloat16", (4,)),)


@pytest.mark.parametrize("name", ["m.mlirbc", "m.bc", "m.mlir", "m", "m.weird"])
def test_import_detects_bytecode_by_first_bytes(tmp_path: Path, isolated: Isolated, name: str) -> None:
    (tmp_path / name).write_bytes(bytecode(STABLEHLO))
    assert import_model(tmp_path / name, isolated=isolated).inputs


def test_import_reads_torch_types(tmp_path: Path, isolated: Isolated) -> None:
    text = (
        "func.func @main(%a: !torch.vtensor<[?,3],ui8>, %b: !torch.vtensor<[],si64>) -> !torch.vtensor<[?,3],ui8> "
        "{ return %a : !torch.vtensor<[?,3],ui8> }"
    )
    model = import_model(write(tmp_path, text), isolated=isolated)
    assert model.inputs == (TensorSpec("arg0", "uint8", ("arg0.dim0", 3)), TensorSpec("arg1", "int64", ()))


def test_import_requires_choice_of_function(tmp_path: Path, isolated: Isolated) -> None:
    path = write(tmp_path, TWO)
    with pytest.raises(UsageError, match="several functions") as caught:
        import_model(path, isolated=isolated)
    assert "f, g" in caught.value.hint
    chosen = import_model(path, function="g", isolated=isolated)
    assert chosen.inputs == (TensorSpec("arg0", "int64", ()), TensorSpec("arg1", "complex64", (3,)))
    with pytest.raises(UsageError, match="no function 'h'") as caught:
        import_model(path, function="h", isolated=isolated)
    assert "f, g" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("func.func @main(", "cannot parse model.mlir: "),
        ("func.func @m(%a: tensor<2xf32>) { %0 = foo.bar %a : tensor<2xf32> return }", "foo"),
        (
            "func.func @m() -> tensor<2xf32> { %0 = arith.constant dense<1> : tensor<3xi8> return %0 : tensor<3xi8> }",
            "",
        ),
        ("module {}", "no public function"),
        ("func.func private @p() { return }", "no public function"),
        (
            "func.func @m(%a: !stream.timepoint) -> !stream.timepoint { return %a : !stream.timepoint }",
            "has type !stream.timepoint",
        ),
        ("func.func @m(%a: tensor<*xf32>) -> tensor<*xf32> { return %a : tensor<*xf32> }", "element type"),
        ("func.func @m(%a: tensor<2xf32>) { return }", "function 'm' of model.mlir has no outputs"),
        ("\0\0\0", ""),
        ("hello", "cannot parse model.mlir: "),
    ],
)
def test_invalid_module_raises_import_error(tmp_path: Path, isolated: Isolated, text: str, words: str) -> None:
    with pytest.raises(ImportFailed) as caught:
        import_model(write(tmp_path, text), isolated=isolated)
    assert words in caught.value.message and "Traceback" not in caught.value.message


def test_truncated_bytecode_raises_import_error(tmp_path: Path, isolated: Isolated) -> None:
    whole = bytecode(STABLEHLO)
    for size in range(4, len(whole), 17):
        (tmp_path / "m.mlirbc").write_bytes(whole[:size])
        with pytest.raises(ImportFailed):
            import_model(tmp_path / "m.mlirbc", isolated=isolated)


def test_import_reads_portable_stablehlo(tmp_path: Path, isolated: Isolated) -> None:
    text = """
vhlo.func_v1 @main(%arg0: !vhlo.tensor_v1<4x!vhlo.f32_v1>) -> (!vhlo.tensor_v1<4x!vhlo.f32_v1>) {
  %0 = "vhlo.add_v1"(%arg0, %arg0) : (!vhlo.tensor_v1<4x!vhlo.f32_v1>, !vhlo.tensor_v1<4x!vhlo.f32_v1>)
      -> !vhlo.tensor_v1<4x!vhlo.f32_v1>
  "vhlo.return_v1"(%0) : (!vhlo.tensor_v1<4x!vhlo.f32_v1>) -> ()
} {arg_attrs = #vhlo.array_v1<[]>, res_attrs = #vhlo.array_v1<[]>, sym_visibility = #vhlo.string_v1<"">}
"""
    model = import_model(write(tmp_path, text, "m.stablehlo"), isolated=isolated)
    assert model.inputs == (TensorSpec("arg0", "float32", (4,)),) and model.function == "main"


def test_import_checks_vmfb_header(tmp_path: Path, isolated: Isolated) -> None:
    path = tmp_path / "m.vmfb"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    model = import_model(path, function="f", isolated=isolated)
    assert (model.format, model.inputs, model.outputs, model.function) == ("vmfb", None, None, "f")
    for content in (b"PK", b"hello" * 100, bytes(1000)):
        path.write_bytes(content)
        with pytest.raises(ImportFailed, match="is not an IREE program"):
            import_model(path, isolated=isolated)


TENSOR, TORCH = "tensor<2xf32>", "!torch.vtensor<[2],f32>"


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        (f"func.func @main(%a: {TENSOR}) -> {TENSOR} {{ return %a : {TENSOR} }}", ["input0: 2 float32"]),
        # IREE's compiler writes no declaration for torch types, which its ONNX import uses.
        (
            f"func.func @main(%a: {TORCH}, %n: !torch.int) -> {TORCH} {{ return %a : {TORCH} }}",
            ["input0: a tensor of unknown type", "input1: scalar int64"],
        ),
        (f"func.func @main(%a: {TENSOR}) {{ return }}", None),
    ],
)
def test_import_reads_vmfb_declaration(tmp_path: Path, isolated: Isolated, text: str, inputs: list[str] | None) -> None:
    from iree import compiler

    flags = ["--iree-llvmcpu-target-cpu=host"]
    program = compiler.compile_str(text, target_backends=["llvm-cpu"], extra_args=flags)
    (tmp_path / "m.vmfb").write_bytes(program)
    if inputs is None:
        with pytest.raises(ImportFailed, match="no outputs") as caught:
            import_model(tmp_path / "m.vmfb", isolated=isolated)
        assert caught.value.hint
        return
    model = import_model(tmp_path / "m.vmfb", isolated=isolated)
    assert (model.format, model.function) == ("vmfb", "main")
    assert list(map(str, model.inputs or ())) == inputs


def test_import_reads_torch_scalars(tmp_path: Path, isolated: Isolated) -> None:
    arguments = "%a: !torch.vtensor<[?,2],si64>, %n: !torch.int, %x: !torch.float, %b: !torch.bool"
    text = f"func.func @f({arguments}) -> !torch.int {{ return %n : !torch.int }}"
    (tmp_path / "m.mlir").write_text(text)
    model = import_model(tmp_path / "m.mlir", isolated=isolated, dims={"arg0.dim0": 4})
    said = ["arg0: 4x2 int64", "arg1: scalar int64", "arg2: scalar float64", "arg3: scalar bool"]
    assert list(map(str, model.inputs or ())) == said


DROPOUT = """
func.func @main(%x: !torch.vtensor<[4],f32>) -> !torch.vtensor<[4],f32> {{
  %p = torch.constant.float 5.0e-01
  %t = torch.constant.bool {training}
  %y = torch.aten.dropout %x, %p, %t
    : !torch.vtensor<[4],f32>, !torch.float, !torch.bool -> !torch.vtensor<[4],f32>
  return %y : !torch.vtensor<[4],f32>
}}
"""
RNG = """
func.func @main(%x: tensor<f32>) -> tensor<4xf32> {
  %shape = stablehlo.constant dense<4> : tensor<1xi64>
  %y = stablehlo.rng %x, %x, %shape, distribution = NORMAL
    : (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}
"""
OPERATOR = """
func.func @main(%x: !torch.vtensor<[4],f32>) -> !torch.vtensor<[4],f32> {
  %y = torch.operator "onnx.RandomNormalLike"(%x) : (!torch.vtensor<[4],f32>) -> !torch.vtensor<[4],f32>
  return %y : !torch.vtensor<[4],f32>
}
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (DROPOUT.format(training="true"), ("torch.aten.dropout",)),
        (DROPOUT.format(training="false"), ()),
        (RNG, ("stablehlo.rng",)),
        (OPERATOR, ("onnx.RandomNormalLike",)),
    ],
    ids=["training", "inference", "stablehlo", "onnx"],
)
def test_import_names_random_operations(tmp_path: Path, text: str, found: tuple[str, ...]) -> None:
    path = tmp_path / "random.mlir"
    path.write_text(text)
    assert describe(str(path), "", {})["producer"].get("random", {}).get("nodes", []) == list(found)


TORCH = """
func.func @main(%x: !torch.vtensor<[4],f32>) -> !torch.vtensor<[4],f32> {
  %eps = torch.constant.float 1.000000e-05
  %one = torch.constant.int 1
  %y = torch.aten.add.Scalar %x, %eps, %one
    : !torch.vtensor<[4],f32>, !torch.float, !torch.int -> !torch.vtensor<[4],f32>
  return %y : !torch.vtensor<[4],f32>
}
"""
INSIDE = """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %wide = arith.extf %x : tensor<4xf32> to tensor<4xf64>
  %y = arith.truncf %wide : tensor<4xf64> to tensor<4xf32>
  return %y : tensor<4xf32>
}
"""
SCALAR = "func.func @main(%x: !torch.float) -> !torch.float { return %x : !torch.float }"


@pytest.mark.parametrize(
    ("text", "expected"), [(ADD, False), (TORCH, False), (INSIDE, True), (TWO, True), (SCALAR, True)]
)
def test_has_float64_depends_on_value_types(tmp_path: Path, isolated: Isolated, text: str, expected: bool) -> None:
    function = "f" if text == TWO else ""
    assert import_model(write(tmp_path, text), function=function, isolated=isolated).has_float64 is expected
