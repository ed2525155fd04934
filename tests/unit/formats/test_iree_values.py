from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.core.tensors import DTYPES, TensorSpec
from hil.errors import LoadFailed, UsageError
from hil.formats.iree_values import (
    format_mlir_type,
    format_reflection,
    get_element_dtype,
    get_element_type,
    parse_declaration,
    parse_type,
)

NAMED = [name for name in DTYPES if name != "string"]


def test_parse_declaration_reads_compiler_output() -> None:
    inputs, outputs = parse_declaration(
        "sync func @main(%input0: tensor<2x?xbf16>, %input1: tensor<i1>, %x: i32, %y: index, %c: tensor<4xcomplex<f32>>"
        " {iree.abi.output = 0 : i64}) -> (%output0: tensor<0x3xui8>, %output1: tensor<4xf8E4M3FN>)"
    )
    assert [str(spec) for spec in inputs] == [
        "input0: 2x? bfloat16",
        "input1: scalar bool",
        "scalar:x: scalar int32",
        "scalar:y: scalar int64",
        "c: 4 complex64",
    ]
    assert [str(spec) for spec in outputs] == ["output0: 0x3 uint8", "output1: 4 float8_e4m3fn"]


def test_parse_declaration_accepts_empty_signature() -> None:
    assert parse_declaration("sync func @main() -> ()") == ((), ())


SPECS = st.lists(
    st.builds(
        TensorSpec,
        st.text("abcXYZ019 :/._-(),[]=#@é", min_size=1, max_size=12).filter(lambda name: name == name.strip()),
        st.sampled_from(NAMED),
        st.lists(st.one_of(st.integers(0, 1 << 40), st.none()), max_size=4).map(tuple),
    ),
    max_size=5,
)


@given(SPECS, SPECS, st.text("main net/0. (", min_size=1, max_size=8))
def test_declaration_round_trips_names_and_types(
    inputs: list[TensorSpec], outputs: list[TensorSpec], function: str
) -> None:
    assert parse_declaration(format_reflection(function, inputs, outputs)) == (tuple(inputs), tuple(outputs))


@pytest.mark.parametrize(
    "text", ["", "hello", "sync func @main(%a: tensor<4xf32>", "sync func @f(%a: !vm.list<?>) -> ()"]
)
def test_parse_declaration_rejects_invalid_text(text: str) -> None:
    with pytest.raises(LoadFailed):
        parse_declaration(text)


@pytest.mark.parametrize("text", ["tensor<*xf32>", "tensor<4xi3>", "!hal.fence", "memref<4xf32>"])
def test_parse_type_rejects_unsupported_types(text: str) -> None:
    with pytest.raises(LoadFailed):
        parse_type("x", text)


def test_mlir_type_rejects_string() -> None:
    with pytest.raises(UsageError, match="string"):
        format_mlir_type(TensorSpec("x", "string", ()))


@pytest.mark.parametrize(
    "dtype", [name for name in NAMED if name not in ("int2", "uint2", "float4_e2m1fn", "float8_e4m3", "float8_e3m4")]
)
def test_element_types_round_trip(dtype: str) -> None:
    assert get_element_dtype(int(get_element_type(dtype)), dtype) == dtype


def test_signless_element_uses_declared_dtype() -> None:
    assert get_element_dtype(int(get_element_type("int8")), "uint8") == "uint8"
    with pytest.raises(LoadFailed):
        get_element_type("float4_e2m1fn")


@pytest.mark.parametrize("dim", ["9" * 19, "9" * 6000, "-1", "²"])
def test_parse_type_rejects_invalid_dimension(dim: str) -> None:
    with pytest.raises(LoadFailed):
        parse_type("x", f"tensor<{dim}xf32>")


@pytest.mark.parametrize(
    "text",
    [
        "func @f(" + ") -> (" * 100_000,
        "func @f(%a" + ": x {" * 100_000 + ") -> ()",
        "func @f(%a" + ": x<" * 100_000 + ") -> ()",
    ],
    ids=["arrows", "attributes", "types"],
)
def test_parse_declaration_rejects_long_invalid_text_quickly(text: str) -> None:
    with pytest.raises(LoadFailed):
        parse_declaration(text)
