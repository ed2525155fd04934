"""Parsing ExecuTorch files without ExecuTorch. Damaged or hostile files raise an error and nothing worse."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from flatbuffers import Builder
from support.executorch_crafted import bundled

from hil.formats.executorch_file import (
    Damaged,
    find_program,
    find_tensor_file,
    is_bundle,
    map_program,
    pick_method,
    read_buffer,
    read_cases,
    read_methods,
)

FILES = Path(__file__).parents[1] / "executorch_files"


def data(name: str) -> memoryview:
    return map_program(FILES / name)


def test_read_methods_returns_signature_backends_and_operators():
    methods = read_methods(data("linear.pte"))
    assert list(methods) == ["forward"]
    method = methods["forward"]
    assert [str(spec) for _, spec in method.list_input_specs()] == ["input0: 2x4 float32"]
    assert [str(spec) for _, spec in method.list_output_specs()] == ["output0: 2x3 float32", "output1: 2x4 float32"]
    assert method.backends == ("XnnpackBackend",)
    assert method.operators == ("dim_order_ops::_to_dim_order_copy.out",)


def test_read_methods_treats_numbers_as_constants():
    method = read_methods(data("numbers.pte"))["forward"]
    assert [(value.kind, value.constant) for value in method.inputs] == [
        ("tensor", None),
        ("int", 2),
        ("double", 0.5),
        ("bool", True),
    ]
    assert [place for place, _ in method.list_input_specs()] == [0]
    assert [spec.name for _, spec in method.list_output_specs()] == ["output0"]


def test_read_methods_marks_dynamic_shape_with_bound():
    method = read_methods(data("dynamic.pte"))["forward"]
    assert method.inputs[0].sizes == (8, 4)
    assert method.inputs[0].dynamic
    assert method.list_input_specs()[0][1].shape == ("input0.dim0", "input0.dim1")
    assert method.list_output_specs()[0][1].shape == (None, None)


def test_read_methods_returns_memory_order_of_dimensions():
    method = read_methods(data("channels_last.pte"))["forward"]
    assert method.inputs[0].sizes == (1, 3, 8, 8)
    assert method.inputs[0].order == (0, 2, 3, 1)


def test_pick_method_selects_named_single_or_forward():
    (method,) = read_methods(data("linear.pte")).values()
    assert pick_method({"a": method}, "") is method
    assert pick_method({"a": method, "forward": method}, "") is method
    assert pick_method({"a": method, "b": method}, "") is None
    assert pick_method({"a": method}, "b") is None


def test_read_cases_returns_cases_of_bundled_program():
    bundle = data("mixed.bpte")
    assert is_bundle(bundle)
    assert not is_bundle(data("linear.pte"))
    program = find_program(bundle)
    assert bytes(program[4:8]) == b"ET12"
    assert read_methods(program) == read_methods(bundle)
    (cases,) = read_cases(bundle).values()
    assert len(cases) == 3
    x, factor = cases[1].inputs
    fractions, positive, integers = cases[1].expected_outputs
    assert (x.dtype, x.shape, factor) == (np.float32, (2, 4), 3)
    assert (fractions.dtype, fractions.shape) == (np.float32, (2, 3))
    np.testing.assert_array_equal(positive, x > 0)
    np.testing.assert_array_equal(integers, x.astype(np.int64))


def read_all(view: memoryview) -> None:
    for method in read_methods(view).values():
        method.list_input_specs(), method.list_output_specs()
    if is_bundle(view):
        read_cases(view)


@pytest.mark.parametrize("name", ["linear.pte", "numbers.pte", "mixed.bpte"])
def test_executorch_readers_handle_damaged_file(name: str):
    whole = bytes(data(name))
    rolled = random.Random(name)
    damaged = [whole[: rolled.randrange(len(whole))] for _ in range(100)]
    for _ in range(400):
        altered = bytearray(whole)
        for _ in range(rolled.randrange(1, 6)):
            at = rolled.randrange(len(altered))
            altered[at : at + 4] = rolled.choice((b"\xff" * 4, b"\0" * 4, rolled.randbytes(4)))[: len(altered) - at]
        damaged.append(bytes(altered))
    refused = 0
    for one in damaged:
        try:
            read_all(memoryview(one))
        except Damaged:
            refused += 1
    assert refused > 50


def test_executorch_readers_reject_other_files(tmp_path: Path):
    empty = tmp_path / "empty.pte"
    empty.touch()
    for read in (map_program, read_buffer):
        with pytest.raises(Damaged, match="the file is empty"):
            read(empty)
    for content, said in (
        (b"x" * 64, "not an ExecuTorch program"),
        (b"\0\0\0\0ET11" + b"\0" * 64, "unsupported ExecuTorch program version 'ET11'"),
    ):
        with pytest.raises(Damaged, match=said):
            read_methods(memoryview(content))
    with pytest.raises(Damaged, match="not an ExecuTorch bundled program"):
        read_cases(data("linear.pte"))


@pytest.mark.ci
def test_read_methods_rejects_small_file_with_huge_content():
    def shared(builder: Builder, table: int) -> int:
        builder.StartVector(4, 3000, 4)
        for _ in range(3000):
            builder.PrependUOffsetTRelative(table)
        return builder.EndVector()

    builder = Builder()
    builder.StartObject(1)
    values = shared(builder, builder.EndObject())
    builder.StartObject(3)
    builder.PrependUOffsetTRelativeSlot(2, values, 0)
    methods = shared(builder, builder.EndObject())  # 3000 references to one method, with 3000 references to one value
    builder.StartObject(2)
    builder.PrependUOffsetTRelativeSlot(1, methods, 0)
    builder.Finish(builder.EndObject(), file_identifier=b"ET12")
    with pytest.raises(Damaged, match="repeated references to the same data exceed the limit"):
        read_methods(memoryview(bytes(builder.Output())))


@pytest.mark.parametrize("sizes", [[1] * 70, [0, 2**31 - 1, 2**31 - 1, 2**31 - 1]])
def test_read_cases_rejects_invalid_shape(sizes: list[int]):
    with pytest.raises(Damaged, match="shape"):
        read_cases(bundled([sizes]))


def test_tensor_file_lookup_uses_name_or_content(tmp_path: Path):
    program, tensors = tmp_path / "net.pte", (FILES / "outside.ptd").read_bytes()
    program.write_bytes((FILES / "outside.pte").read_bytes())
    methods = read_methods(map_program(program))
    assert methods["forward"].external == ("l.weight", "l.bias")
    with pytest.raises(
        Damaged, match=r"2 tensors, such as l.bias, but .* store the right file next to .* name net.ptd"
    ):
        find_tensor_file(program, methods)
    (tmp_path / "other.ptd").write_bytes(tensors)
    (tmp_path / "broken.ptd").write_bytes(tensors[:40])
    assert find_tensor_file(program, methods) == tmp_path / "other.ptd"
    (tmp_path / "again.ptd").write_bytes(tensors)
    with pytest.raises(Damaged, match=r"multiple files contain them: again\.ptd, other\.ptd"):
        find_tensor_file(program, methods)
    (tmp_path / "net.ptd").write_bytes(tensors)
    assert find_tensor_file(program, methods) == tmp_path / "net.ptd"
    (tmp_path / "net.ptd").write_bytes(b"no such file")
    with pytest.raises(Damaged, match="not an ExecuTorch tensor file"):
        find_tensor_file(program, methods)
    plain = tmp_path / "linear.pte"
    plain.write_bytes((FILES / "linear.pte").read_bytes())
    assert find_tensor_file(plain, read_methods(map_program(plain))) is None
