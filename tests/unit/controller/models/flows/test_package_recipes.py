"""A package recipe that breaks a model raises an error of the recipe."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.recipe import apply_recipe
from hil.controller.storage.cache import Cache
from hil.controller.storage.run_context import RunContext
from hil.core.named import resolve
from hil.errors import ImportFailed

MODULE = """
from pathlib import Path
import onnx
from hil.plugins import Recipe

def apply(model, output, external, samples):
    graph = onnx.load(model)
    {body}

X = Recipe(apply)
"""
SAVE = "; onnx.save(graph, output)"


class InProcess:
    """Call functions in this process."""

    def call(self, function: Any, args: dict[str, Any], **_: Any) -> Any:
        return (resolve(function) if isinstance(function, str) else function)(**args)


@pytest.fixture
def apply_to(package, cache: Cache, tmp_path: Path):
    def applied(path: Path, body: str) -> Path:
        package(MODULE.format(body=body), "[hil.recipes]\nodd = MODULE:X\n")
        context: Any = RunContext(cache, InProcess())
        return apply_recipe(Flow("f", "iree", recipe="odd"), path, [], context, tmp_path / "log")

    return applied


@pytest.fixture
def apply(apply_to, save_onnx):
    nodes = [helper.make_node("Neg", ["x"], ["y"])]
    path = save_onnx(nodes, [("x", TensorProto.FLOAT, ("N", 3))], [("y", TensorProto.FLOAT, ("N", 3))])
    return partial(apply_to, path)


def test_recipe_may_change_model_with_same_signature(apply) -> None:
    assert apply("graph.producer_name = 'vendor'" + SAVE).is_file()
    assert apply("graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2" + SAVE).is_file()


@pytest.mark.parametrize(("before", "after"), [(None, ("N", 3)), (("N", 3), None)])
def test_recipe_may_change_inferred_output_shapes(apply_to, save_onnx, before, after) -> None:
    nodes = [helper.make_node("Odd", ["x"], ["y"], domain="vendor")]
    sides = [("x", TensorProto.FLOAT, ("N", 3))], [("y", TensorProto.FLOAT, before)]
    path = save_onnx(nodes, *sides, domains=("vendor",))
    assert apply_to(path, f"graph.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info('y', 1, {after}))" + SAVE)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", "the recipe wrote no file"),
        ("Path(output).write_text('no model')", "the file cannot be read: .*is not an ONNX model"),
        (
            "graph.graph.input[0].name = graph.graph.node[0].input[0] = 'z'" + SAVE,
            "inputs changed from x: .* to z: ",
        ),
        (
            "graph.graph.output[0].name = graph.graph.node[0].output[0] = 'z'" + SAVE,
            "outputs changed from y: .* to z: ",
        ),
        (
            "graph.graph.output.append(onnx.helper.make_tensor_value_info('x', 1, ['N', 3]))" + SAVE,
            "outputs changed from y: .* to y: .*, x: ",
        ),
        ("graph.graph.input[0].type.tensor_type.elem_type = 11" + SAVE, "inputs changed from x: .* to x: .*64"),
        (
            "graph.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 4" + SAVE,
            "inputs changed from x: .*3.* to x: .*4",
        ),
        (
            "del graph.graph.input[0].type.tensor_type.shape.dim[1]" + SAVE,
            "inputs changed from x: Nx3 .* to x: N float32",
        ),
    ],
)
def test_recipe_changing_signature_raises_import_error(apply, body: str, message: str) -> None:
    with pytest.raises(
        ImportFailed, match=rf"invalid .*\.onnx from the recipe odd of the package vendor 1.0: {message}"
    ) as caught:
        apply(body)
    assert caught.value.stage == "import" and "keep the names" in caught.value.hint
