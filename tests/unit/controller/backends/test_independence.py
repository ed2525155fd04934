"""Independence of references from runtimes, and the default order of references."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hil.controller.backends.references import default_chain, references
from hil.controller.backends.references.independence import SHARED, relation_of, shared_parts
from hil.core.results import Relation
from hil.core.runtimes import RUNTIMES


def test_table_names_known_runtimes_and_references() -> None:
    known = references()
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
    assert relation_of(runtime, reference).value == relation


def test_default_chain_never_contains_self_check() -> None:
    formats = {one for reference in references().values() for one in reference.formats}
    for model_format, runtime in itertools.product(formats, RUNTIMES):
        chain = default_chain(model_format, runtime)
        assert Relation.SELF_CHECK not in [relation_of(runtime, name) for name in chain]
    assert default_chain("onnx", "iree") == ("onnxruntime", "onnx-reference")
    assert default_chain("onnx", "onnxruntime") == ("onnx-reference", "onnxruntime")
    assert default_chain("mlir", "iree") == ()


def test_package_shares_build_with_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {("hil.references", "cutter-model"): "cutter", ("hil.compilers", "cutter"): "cutter"}

    def package_of(group: str, name: str) -> Any:
        return packages.get((group, name), "")

    monkeypatch.setattr("hil.controller.backends.references.independence.package_of", package_of)
    assert shared_parts("cutter", "cutter-model") == ("build",)
    assert relation_of("cutter", "cutter-model") is Relation.SAME_LIBRARY
    assert relation_of("iree", "cutter-model") is relation_of("cutter", "onnxruntime") is Relation.INDEPENDENT
