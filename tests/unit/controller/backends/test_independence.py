"""Independence of references from runtimes, and the default order of references."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hil.controller.backends.references import list_default_chain, load_references
from hil.controller.backends.references.independence import SHARED, find_relation, list_shared_parts
from hil.core.results import Relation
from hil.core.runtimes import RUNTIMES


def test_table_names_known_runtimes_and_references() -> None:
    known = load_references()
    assert all(runtime in RUNTIMES and reference in known for runtime, reference in SHARED)
    assert all(parts for parts in SHARED.values())


@pytest.mark.parametrize(
    ("runtime", "reference", "relation"),
    [
        ("iree", "iree-llvm-cpu", "self-check"),
        ("iree", "onnxruntime", "independent"),
        ("iree", "onnx-reference", "independent"),
        ("iree", "tensorflow", "independent"),
        ("iree", "torch-eager", "independent"),
        ("onnxruntime", "onnxruntime", "same library"),
        ("onnxruntime", "onnx-reference", "independent"),
        ("onnxruntime", "iree-llvm-cpu", "independent"),
        ("tflite", "tflite", "same library"),
        ("tflite", "tflite-builtin", "same library"),
        ("executorch", "torch-eager", "same library"),
        ("xla-aot", "tensorflow", "same library"),
    ],
)
def test_relation_follows_from_shared_parts(runtime: str, reference: str, relation: str) -> None:
    assert find_relation(runtime, reference).value == relation


def test_default_chain_never_contains_self_check() -> None:
    formats = {one for reference in load_references().values() for one in reference.formats}
    for model_format, runtime in itertools.product(formats, RUNTIMES):
        chain = list_default_chain(model_format, runtime)
        assert Relation.SELF_CHECK not in [find_relation(runtime, name) for name in chain]
    assert list_default_chain("onnx", "iree") == ("onnxruntime", "onnx-reference")
    assert list_default_chain("onnx", "onnxruntime") == ("onnx-reference", "onnxruntime")
    assert list_default_chain("mlir", "iree") == ()


def test_package_shares_build_with_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {("hil.references", "cutter-model"): "cutter", ("hil.compilers", "cutter"): "cutter"}

    def package_of(group: str, name: str) -> Any:
        return packages.get((group, name), "")

    monkeypatch.setattr("hil.controller.backends.references.independence.find_package", package_of)
    assert list_shared_parts("cutter", "cutter-model") == ("build",)
    assert find_relation("cutter", "cutter-model") is Relation.SAME_LIBRARY
    assert find_relation("iree", "cutter-model") is find_relation("cutter", "onnxruntime") is Relation.INDEPENDENT
