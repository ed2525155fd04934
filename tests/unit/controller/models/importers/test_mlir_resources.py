from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.models.importers.mlir import describe, parse
from hil.controller.models.importers.mlir_resources import _find_in_text
from hil.errors import ImportFailed

MODULE = """
func.func @main(%x: tensor<4x{element}>) -> tensor<4x{element}> {{
  %w = arith.constant dense_resource<"{name}"> : tensor<4x{element}>
  return %w : tensor<4x{element}>
}}
{{-#
  dialect_resources: {{ builtin: {{ other: "0x0400000000000000", "{held}": "0x04000000{data}" }} }}
#-}}
"""


def write(folder: Path, size: int, element: str = "f32", *, bytecode: bool = False, held: str = "w") -> str:
    path = folder / "model.mlir"
    path.write_text(MODULE.format(element=element, name="w", held=held, data="3F" * size))
    if bytecode:
        module = parse(str(path))
        with path.open("wb") as file:
            module.operation.write_bytecode(file)
    return str(path)


@pytest.mark.parametrize("bytecode", [False, True])
@pytest.mark.parametrize(("element", "size"), [("f32", 16), ("bf16", 8), ("i8", 4), ("f64", 32), ("complex<f32>", 32)])
def test_resource_of_correct_size_imports(tmp_path: Path, element: str, size: int, bytecode: bool) -> None:
    assert describe(write(tmp_path, size, element, bytecode=bytecode), "", {})["outputs"][0][2] == [4]


@pytest.mark.parametrize("bytecode", [False, True])
@pytest.mark.parametrize(
    ("element", "size", "needed"), [("f32", 15, 16), ("f32", 20, 16), ("i8", 3, 4), ("f64", 16, 32)]
)
def test_resource_of_wrong_size_raises_import_error(
    tmp_path: Path, element: str, size: int, needed: int, bytecode: bool
) -> None:
    words = rf"model.mlir: resource 'w' \(tensor<4x{element}>\) has {size} bytes, expected {needed}"
    with pytest.raises(ImportFailed, match=words):
        describe(write(tmp_path, size, element, bytecode=bytecode), "", {})


def test_resource_without_data_raises_import_error(tmp_path: Path) -> None:
    with pytest.raises(ImportFailed, match=r"resource 'w' .* has no data"):
        describe(write(tmp_path, 16, held="v"), "", {})


def test_truncated_bytecode_raises_import_error(tmp_path: Path) -> None:
    path = Path(write(tmp_path, 16, bytecode=True))
    whole = path.read_bytes()
    for size in range(4, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ImportFailed):
            describe(str(path), "", {})


def test_long_resource_names_take_linear_time() -> None:
    assert list(_find_in_text(b'{-# x: "' + b"a" * 1_000_000 + b'", w: "0x0400000000000000" #-}')) == [("w", 4)]
