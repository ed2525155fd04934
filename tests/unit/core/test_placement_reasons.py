"""Reasons of a placement are grouped, bounded and formatted."""

from __future__ import annotations

from hil.core.placement_reasons import (
    MAX_NAMES,
    MAX_REASON_CHARS,
    MAX_REASONS,
    PlacementReason,
    format_reasons,
    group_reasons,
    match_compiler_reasons,
)
from hil.core.results import Part


def test_group_reasons_starts_with_most_frequent():
    found = group_reasons([("no kernel", "a"), ("wrong\n dtype", "b"), ("wrong dtype", "c")])
    assert found == (PlacementReason("wrong dtype", 2, ("b", "c")), PlacementReason("no kernel", 1, ("a",)))


def test_group_reasons_is_bounded():
    found = group_reasons((f"{number % 30}" + "x" * 1000, f"node {number}") for number in range(3000))
    assert len(found) == MAX_REASONS
    assert max(len(one.text) for one in found) == MAX_REASON_CHARS
    assert sum(len(one.names) for one in found) == MAX_NAMES
    assert {one.nodes for one in found} == {100}


def test_part_keeps_reasons_in_json():
    part = Part.of("cpu", ["a", "b"], elsewhere=True, why={"a": "no kernel"})
    assert part.reasons == (PlacementReason("no kernel", 1, ("a",)),)
    assert Part.from_json(part.to_json()) == part
    assert Part.from_json({"device": "cpu", "nodes": 1, "names": [], "elsewhere": True}).reasons == ()


def test_format_reasons_counts_unreported_nodes():
    lines = format_reasons([("no kernel", 2, ["a", "b"])], 5, "cpu", "onnxruntime")
    assert lines == ["2 nodes on cpu: no kernel (a, b)", "3 nodes on cpu: reason not reported by onnxruntime"]
    assert format_reasons([], 0, "cpu", "iree") == ["on cpu: reason not reported by iree"]
    assert format_reasons([("no kernel", 1, [])], 1, "cpu", "iree") == ["1 node on cpu: no kernel"]


def test_format_reasons_shortens_names():
    (line,) = format_reasons([("no kernel", 20, [f"n{number}" for number in range(20)])], 20, "cpu", "iree")
    assert line.endswith("n6, n7 and 12 more)")


def test_match_compiler_reasons_ignores_variants_of_operators():
    reasons = {"aten._softmax.default": {"dim must be the last dim": 1}, "aten.add.Tensor": {"invalid dtype": 1}}
    names = ["aten::_softmax.out", "aten::add.out", "aten::mul.out"]
    assert match_compiler_reasons(names, 3, reasons) == (
        PlacementReason("dim must be the last dim", 1, ("aten::_softmax.out",)),
        PlacementReason("invalid dtype", 1, ("aten::add.out",)),
    )


def test_match_compiler_reasons_does_not_guess_between_reasons():
    reasons = {"aten.add.Tensor": {"invalid dtype": 1, "too many dims": 1}}
    (found,) = match_compiler_reasons(["aten::add.out"] * 2, 2, reasons)
    assert (found.text, found.nodes) == ("invalid dtype or: too many dims", 2)


def test_match_compiler_reasons_counts_calls_without_names():
    reasons = {"aten.add.Tensor": {"invalid dtype": 200}, "aten.mul.Tensor": {"invalid dtype": 100}}
    (found,) = match_compiler_reasons(["aten::add.out"] * 200, 300, reasons)
    assert (found.nodes, len(found.names)) == (300, 200)
