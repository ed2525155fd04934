"""A module's functions, and the choice of the default function."""

from __future__ import annotations

from typing import Any

import pytest

from hil.core.tensors import TensorSpec
from hil.errors import LoadFailed
from hil.formats.iree_values import (
    Function,
    choose_function,
    list_entry_points,
    list_module_functions,
    parse_convention,
)


class FakeFunction:
    def __init__(self, name: str, convention: str, reflection: dict[str, str]) -> None:
        self.reflection = reflection
        self.text = f"<VmFunction {name}({convention}), reflection = {reflection}>"

    def __repr__(self) -> str:
        return self.text


class FakeModule:
    """A module with the interface of IREE's bindings."""

    def __init__(self, **functions: tuple[str, dict[str, str]]) -> None:
        self.functions = functions
        self.function_names = [*functions, "__init"]

    def lookup_function(self, name: str) -> Any:
        return FakeFunction(name, *self.functions[name])


def found(**functions: tuple[str, dict[str, str]]) -> dict[str, Function]:
    return list_module_functions(FakeModule(**functions))


def test_parse_convention_separates_tensors_from_numbers():
    inputs, outputs = parse_convention("0rIifF_rI")
    assert inputs == (
        TensorSpec("input0", "", ()),
        TensorSpec("scalar:input1", "int64", ()),
        TensorSpec("scalar:input2", "int32", ()),
        TensorSpec("scalar:input3", "float32", ()),
        TensorSpec("scalar:input4", "float64", ()),
    )
    assert outputs == (TensorSpec("output0", "", ()), TensorSpec("scalar:output1", "int64", ()))
    assert parse_convention("0v_v") == ((), ())


@pytest.mark.parametrize("text", ["", "1r_r", "0r", "0CrD_r", "0rx_r"])
def test_parse_convention_rejects_unknown_convention(text):
    with pytest.raises(LoadFailed, match="calling convention"):
        parse_convention(text)


def test_function_signature_prefers_declaration():
    name = "net (v2)"
    functions = found(
        **{name: ("0r_r", {"iree.abi.declaration": f"sync func @{name}(%x: tensor<2xf32>) -> (%y: i32)"})}
    )
    assert functions[name].make_signature() == (
        (TensorSpec("x", "float32", (2,)),),
        (TensorSpec("scalar:y", "int32", ()),),
    )


def test_choose_function_prefers_synchronous_function():
    fences = {"iree.abi.model": "coarse-fences"}
    functions = found(**{"f$async": ("0rrr_r", {}), "f": ("0r_r", {}), "g": ("0rrr_r", fences)})
    assert list_entry_points(functions) == ["f"]
    assert choose_function(functions, "").name == "f"
    assert choose_function(functions, "g").fences
    assert choose_function(functions, "f$async").convention == "0rrr_r"
    # Without alternatives, the tool takes this function too.
    assert choose_function(found(g=("0rrr_r", fences)), "").name == "g"


@pytest.mark.parametrize(
    ("names", "asked", "said"),
    [
        (["f", "g"], "", "multiple functions, and no function was selected"),
        (["f", "main"], "nope", "no function 'nope'"),
        (["f$async"], "", "no functions"),
        ([], "", "no functions"),
    ],
)
def test_choose_function_reports_ambiguous_or_unknown_name(names, asked, said):
    with pytest.raises(LoadFailed, match=said):
        choose_function(found(**{name: ("0r_r", {}) for name in names}), asked)
