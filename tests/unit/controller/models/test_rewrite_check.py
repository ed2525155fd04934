from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto, TensorProto, helper, version_converter

from hil.controller.models.importers import import_model
from hil.controller.models.onnx_files import onnx_rewrites, rewrite_check
from hil.controller.models.onnx_files.rewrite_check import check_rewrites, find_difference
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.core.results import Model
from hil.errors import ImportFailed

FLOAT = TensorProto.FLOAT
SHAPE = (2, 3, 4)
X = {"x": np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)}


class InThisProcess:
    """Fake for isolated processes: calls functions in this process and counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def call(self, function: Any, arguments: dict[str, Any], **_: Any) -> Any:
        self.calls += 1
        return function(**arguments)


@pytest.fixture
def checked(cache: Cache, tmp_path: Path) -> Callable[..., int]:
    """Return checked(model, inputs), which runs the check and returns the number of process calls."""

    def call(model: Model, inputs: Any = X) -> int:
        isolated = InThisProcess()
        work: Any = {"isolated": isolated, "cache": cache, "recompute": False, "timeout": 60.0}
        check_rewrites(model, inputs, log=tmp_path / "log", **work)
        return isolated.calls

    return call


@pytest.fixture
def hardmax(save_onnx: Callable[..., Path], isolated: Isolated) -> Model:
    node = helper.make_node("Hardmax", ["x"], ["y"])
    path = save_onnx([node], [("x", FLOAT, SHAPE)], [("y", FLOAT, SHAPE)], opset=11, name="hardmax.onnx")
    return import_model(path, isolated=isolated)


def break_converter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_rewrites, "convert_opset", version_converter.convert_version)


def test_check_runs_once_for_correct_conversion(checked: Callable[..., int], hardmax: Model) -> None:
    assert (checked(hardmax), checked(hardmax)) == (1, 0)
    assert checked(hardmax, {"x": X["x"] + 1}) == 1


def test_check_repeats_after_code_change(
    checked: Callable[..., int], hardmax: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (checked(hardmax), checked(hardmax)) == (1, 0)
    monkeypatch.setattr(rewrite_check, "digest_code", lambda *patterns: "another digest")
    assert checked(hardmax) == 1


def test_check_names_rewrite_changing_an_output(
    checked: Callable[..., int], hardmax: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_converter(monkeypatch)
    for _ in range(2):  # made, and from the cache
        with pytest.raises(ImportFailed, match=r"^onnx.version_converter 11 -> 17 changed output y: ") as caught:
            checked(hardmax)
        assert (caught.value.outcome, caught.value.stage) == ("IMPORT_ERROR", "import")


def test_check_names_inliner(
    checked: Callable[..., int], save_onnx: Callable[..., Path], isolated: Isolated, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnx import inliner

    elu = helper.make_node("Elu", ["a"], ["b"])
    elu.attribute.append(AttributeProto(name="alpha", type=AttributeProto.FLOAT, ref_attr_name="slope"))
    opsets, slope = [helper.make_opsetid("", 17)], helper.make_attribute("slope", 0.25)
    function = helper.make_function("own", "F", ["a"], ["b"], [elu], opsets, attribute_protos=[slope])
    node = helper.make_node("F", ["x"], ["y"], domain="own")
    sides = [("x", FLOAT, SHAPE)], [("y", FLOAT, SHAPE)]
    path = save_onnx([node], *sides, functions=[function], domains=("own",))
    model = import_model(path, isolated=isolated)
    assert checked(model) == 1
    monkeypatch.setattr(onnx_rewrites, "inline_functions", inliner.inline_local_functions)
    monkeypatch.setattr(rewrite_check, "digest_code", lambda *patterns: "another digest")
    with pytest.raises(ImportFailed, match=r"^onnx.inliner changed output y: "):
        checked(model)


def test_check_skips_models_without_rewrite(
    checked: Callable[..., int], save_onnx: Callable[..., Path], isolated: Isolated
) -> None:
    path = save_onnx([helper.make_node("Relu", ["x"], ["y"])], [("x", FLOAT, SHAPE)], [("y", FLOAT, SHAPE)], opset=11)
    assert checked(import_model(path, isolated=isolated)) == 0


def test_check_skips_random_models(
    checked: Callable[..., int], save_onnx: Callable[..., Path], isolated: Isolated
) -> None:
    nodes = [helper.make_node("RandomNormalLike", ["x"], ["r"]), helper.make_node("Hardmax", ["r"], ["y"])]
    path = save_onnx(nodes, [("x", FLOAT, SHAPE)], [("y", FLOAT, SHAPE)], opset=11)
    assert checked(import_model(path, isolated=isolated)) == 0


def test_check_accepts_models_unsupported_by_onnxruntime(
    checked: Callable[..., int], hardmax: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_converter(monkeypatch)
    assert checked(hardmax, {"x": X["x"].astype(np.float64)}) == 1


VALUES = np.array([1, -2, 1e-6, np.nan, np.inf], np.float32)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (VALUES, VALUES, ""),
        (VALUES, VALUES * np.float32(1 + 1e-6), ""),
        (VALUES, VALUES * np.float32(1.001), r"2 of 5 values differ, at [0] 1.001"),
        (VALUES, np.where(np.isnan(VALUES), np.float32(0), VALUES), "1 of 5 values differ, at [3] 0.0, was nan"),
        (VALUES, np.where(np.isinf(VALUES), -VALUES, VALUES), "1 of 5 values differ, at [4] -inf, was inf"),
        (VALUES, VALUES[:4], "float32 (4,), was float32 (5,)"),
        (VALUES, VALUES.astype(np.float64), "float64 (5,), was float32 (5,)"),
        (np.array([3, 4]), np.array([3, 5]), "1 of 2 values differ, at [1] 5, was 4"),
        (np.array([True]), np.array([False]), "1 of 1 values differ"),
        (np.array(["a"], object), np.array(["b"], object), "1 of 1 values differ"),
        (np.zeros(0, np.float32), np.zeros(0, np.float32), ""),
        (np.zeros(3, np.float32), np.full(3, 1e-30, np.float32), "3 of 3 values differ"),
    ],
)
def test_difference_allows_rounding_only(old: Any, new: Any, words: str) -> None:
    found = find_difference({"y": old}, {"y": new})
    assert found.startswith("output y: ") and words in found if words else found == ""
