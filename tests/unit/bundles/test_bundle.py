"""Bundles: saved and loaded contents match, and only cases that fit the program are accepted."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bundle_files import X, Y, bundle, case, program

from hil.bundles import Bundle, MethodTestCase, MethodTestSuite, Signature, layout
from hil.bundles.cases import select_methods
from hil.controller.models.inputs import make_random_tensor
from hil.core.digest import digest_of
from hil.core.results import Artifact
from hil.core.tensors import DTYPES, TensorSpec, get_dtype_name
from hil.errors import StorageError, UnreadableFile, UsageError

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
specs = st.builds(TensorSpec, st.just(""), st.sampled_from(DTYPES), shapes)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    if get_dtype_name(one.dtype) == "string":
        return one.shape == other.shape and one.tolist() == other.tolist()
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@given(inputs=st.lists(specs, max_size=3), outputs=st.lists(specs, min_size=1, max_size=3), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_bundle_save_and_open_round_trip(inputs, outputs, seed):
    inputs = [replace(spec, name=f"in {number}") for number, spec in enumerate(inputs)]
    outputs = [replace(spec, name=f"out {number}") for number, spec in enumerate(outputs)]
    given_, expected = (
        [make_random_tensor(spec, spec.shape, seed=seed) for spec in specs] for specs in (inputs, outputs)
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        made = Bundle.create(
            program(place, inputs, outputs),
            [MethodTestSuite("f", [MethodTestCase(given_, expected, name="a case", source="somebody 1")])],
            made={"model": {"seed": seed}, "list": [1, None, "x"]},
        )
        made.save(place / "b.hilb")
        opened = Bundle.open(place / "b.hilb")
        (method,) = opened.methods
        (found,) = method.cases
        assert method.signature == Signature(tuple(inputs), tuple(outputs))
        assert (found.name, found.source, found.rtol, found.atol) == ("a case", "somebody 1", None, None)
        for arrays, tensors, specs_ in ((given_, found.inputs, inputs), (expected, found.expected_outputs, outputs)):
            assert list(tensors) == [spec.name for spec in specs_]
            assert all(same(one, other) for one, other in zip(arrays, tensors.values(), strict=True))
        assert bytes(opened.program.files["weights/w.bin"]) == b"weights/w.bin" * 7
        assert (opened.program.main, opened.program.flags, opened.digest) == ("main.bin", ("--flag",), made.digest)
        assert opened.made == {"model": {"seed": seed}, "list": [1, None, "x"]}
        opened.save(place / "again.hilb")
        assert (place / "again.hilb").read_bytes() == (place / "b.hilb").read_bytes()


def test_bundle_bytes_are_reproducible_across_processes(tmp_path):
    bundle(tmp_path).save(tmp_path / "here.hilb")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from support.bundle_files import bundle\n"
        "bundle(Path(sys.argv[2])).save(Path(sys.argv[2]) / 'there.hilb')"
    )
    other = tmp_path / "other"
    other.mkdir()
    tests = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script, str(tests), str(other)], check=True, env={"PYTHONHASHSEED": "7"})
    assert (other / "there.hilb").read_bytes() == (tmp_path / "here.hilb").read_bytes()


def test_bundle_deduplicates_equal_tensors(tmp_path):
    one, many = (bundle(tmp_path, *(case(500, name=str(n)) for n in range(count))) for count in (1, 50))
    assert many.head.size - one.head.size < 50 * 1000


def test_bundle_survives_deletion_of_source_files(tmp_path):
    made = bundle(tmp_path)
    (tmp_path / "main.bin").unlink()
    made.save(tmp_path / "b.hilb")
    assert bytes(Bundle.open(tmp_path / "b.hilb").program.files["main.bin"]) == b"main.bin" * 7


def test_bundle_extract_writes_program_files(tmp_path):
    (tmp_path / "out").mkdir()
    artifact = bundle(tmp_path).extract(tmp_path / "out")
    assert artifact.files[artifact.main].read_bytes() == b"main.bin" * 7
    assert (tmp_path / "out" / "weights" / "w.bin").read_bytes() == b"weights/w.bin" * 7
    with pytest.raises(StorageError):  # extract never overwrites a file
        bundle(tmp_path).extract(tmp_path / "out")


def test_bundle_open_does_not_depend_on_later_file_changes(tmp_path):
    # Accessing a memory map of a truncated file would kill this process.
    bundle(tmp_path).save(tmp_path / "b.hilb")
    opened = Bundle.open(tmp_path / "b.hilb")
    os.truncate(tmp_path / "b.hilb", 0)
    (tmp_path / "out").mkdir()
    extracted = opened.extract(tmp_path / "out")
    assert extracted.files["main.bin"].read_bytes() == b"main.bin" * 7


def test_bundle_open_rejects_file_truncated_while_read(tmp_path, monkeypatch):
    made = Bundle.create(
        program(tmp_path, [TensorSpec("x", "uint8", (1 << 16,))], [TensorSpec("y", "uint8", (1 << 16,))]),
        [MethodTestSuite("f", [MethodTestCase([np.zeros(1 << 16, "u1")], [np.ones(1 << 16, "u1")], name="a")])],
    )
    path = tmp_path / "b.hilb"
    made.save(path)

    def digest_and_truncate(data):
        os.truncate(path, 4096)
        return digest_of(data)

    monkeypatch.setattr(layout, "digest_of", digest_and_truncate)
    with pytest.raises(UnreadableFile, match=r"b\.hilb cannot be read: it was truncated"):
        Bundle.open(path)


@pytest.mark.parametrize("rtol", [10**400, "much", -1, float("nan")])
def test_bundle_rejects_invalid_tolerance(tmp_path, rtol):
    with pytest.raises(UsageError, match=r"method 'f', case 0: .*tol"):
        bundle(tmp_path, case(rtol=rtol))


def test_bundle_save_reports_unwritable_path(tmp_path):
    with pytest.raises(StorageError, match="cannot be written"):
        bundle(tmp_path).save(tmp_path / "missing" / "b.hilb")


F32 = np.float32
WRONG = {
    "method 'f', case 1, input 'x' is 3x4 float32, but the method takes Nx2 float32": MethodTestCase(
        [np.ones((3, 4), F32)], [np.ones(3, F32)]
    ),
    "method 'f', case 1, input 'x' is 6 float32": MethodTestCase([np.ones(6, F32)], [np.ones(3, F32)]),
    "input 'x' is 3x2 int32, but the method takes Nx2 float32": MethodTestCase(
        [np.ones((3, 2), "i4")], [np.ones(3, F32)]
    ),
    "input 'x' is 3x2 float64": MethodTestCase([np.ones((3, 2))], [np.ones(3, F32)]),
    "got 2 inputs, but the method has 1": MethodTestCase([np.ones((3, 2), F32)] * 2, [np.ones(3, F32)]),
    "got 0 inputs": MethodTestCase([], [np.ones(3, F32)]),
    "got 0 outputs": MethodTestCase([np.ones((3, 2), F32)], []),
    "the method has no input 'z'": MethodTestCase({"z": np.ones((3, 2), F32)}, [np.ones(3, F32)]),
    "input 'x' is missing": MethodTestCase({}, [np.ones(3, F32)]),
    "output 'y' has size 4 in dimension 'N', but input 'x' has size 3": MethodTestCase(
        [np.ones((3, 2), F32)], [np.ones(4, F32)]
    ),
    "case 1 ('odd'), output 'y' is 3x1 float32": MethodTestCase(
        [np.ones((3, 2), F32)], [np.ones((3, 1), F32)], name="odd"
    ),
    "rtol is 2": MethodTestCase([np.ones((3, 2), F32)], [np.ones(3, F32)], rtol=2),
    "flipped signs would agree": MethodTestCase([np.ones((3, 2), F32)], [np.ones(3, F32)], atol=3),
    "atol is nan": MethodTestCase([np.ones((3, 2), F32)], [np.ones(3, F32)], atol=float("nan")),
    "duplicate case name": MethodTestCase([np.ones((3, 2), F32)], [np.ones(3, F32)], name="0"),
    "is not an array": MethodTestCase([[[1.0], [1.0, 2.0]]], [np.ones(3, F32)]),
    "contains Python objects": MethodTestCase([np.array([None, None], object)], [np.ones(3, F32)]),
    "tensors of dtype": MethodTestCase([np.ones((3, 2), "M8[s]")], [np.ones(3, F32)]),
}


@pytest.mark.parametrize("message", WRONG)
def test_bundle_rejects_mismatched_case_with_exact_location(tmp_path, message):
    with pytest.raises(UsageError) as caught:
        bundle(tmp_path, case(), WRONG[message])
    assert message in caught.value.message
    assert "method 'f', case 1" in caught.value.message


def test_bundle_vacuous_tolerance_error_has_usable_hint(tmp_path):
    with pytest.raises(UsageError) as caught:
        bundle(tmp_path, WRONG["flipped signs would agree"])
    assert caught.value.hint == "use a smaller tolerance for the case"


def test_bundle_rejects_unknown_method_and_lists_known_methods(tmp_path):
    with pytest.raises(UsageError, match="no method 'forwards'") as caught:
        Bundle.create(program(tmp_path), [MethodTestSuite("forwards", [case()])])
    assert "methods: f" in caught.value.hint


def test_bundle_requires_a_case_in_some_method(tmp_path):
    artifact = program(tmp_path)
    signature = Signature((X,), (Y,))
    two = Bundle.create(artifact, [MethodTestSuite("f", [case()])], signatures={"f": signature, "g": signature})
    assert [len(method.cases) for method in two.methods] == [1, 0]
    with pytest.raises(UsageError, match="the bundle has no test cases"):
        Bundle.create(artifact, [MethodTestSuite("f", [])])


def test_bundle_rejects_program_with_unknown_signature(tmp_path):
    artifact = replace(program(tmp_path), inputs=None)
    with pytest.raises(UsageError, match="only a board can determine"):
        Bundle.create(artifact, [MethodTestSuite("f", [case()])])


@pytest.mark.parametrize(
    ("dtype", "number"), [("float32", 0.5), ("bfloat16", 0.5), ("int8", -3), ("uint4", 15), ("bool", True)]
)
def test_bundle_converts_number_to_scalar_of_dtype(tmp_path, dtype, number):
    scalar = TensorSpec("s", dtype, ())
    made = Bundle.create(
        program(tmp_path, [scalar], [scalar]), [MethodTestSuite("f", [MethodTestCase([number], [number])])]
    )
    assert made.methods[0].cases[0].inputs["s"].item() == number


@pytest.mark.parametrize(("dtype", "number"), [("int8", 300), ("uint8", -1), ("int4", 9), ("int32", 0.5), ("bool", 1)])
def test_bundle_rejects_number_outside_dtype_range(tmp_path, dtype, number):
    scalar = TensorSpec("s", dtype, ())
    with pytest.raises(UsageError, match="input 's'"):
        Bundle.create(program(tmp_path, [scalar], [scalar]), [MethodTestSuite("f", [MethodTestCase([number], [0])])])


def test_bundle_unnamed_dimensions_may_differ(tmp_path):
    spec = TensorSpec("x", "bfloat16", (None, None))
    value = np.ones((2, 3), ml_dtypes.bfloat16)
    made = Bundle.create(
        program(tmp_path, [spec], [spec]), [MethodTestSuite("f", [MethodTestCase([value], [value.T])])]
    )
    assert made.methods[0].signature.inputs == (spec,)


@pytest.mark.parametrize(
    "made", [{"x": object()}, {"x": float("nan")}, {"x": "\ud800"}, {"x": eval("[" * 40 + "]" * 40)}]
)
def test_bundle_rejects_metadata_unsuitable_for_json(tmp_path, made):
    with pytest.raises((UsageError, ValueError)):
        Bundle.create(program(tmp_path), [MethodTestSuite("f", [case()])], made=made)


TWO_METHODS = Path(__file__).parents[1] / "executorch_files" / "methods.pte"


def suites_of(made: Bundle) -> list[MethodTestSuite]:
    return [
        MethodTestSuite(
            method.name,
            [MethodTestCase(one.inputs, one.expected_outputs, name=one.name) for one in method.cases],
        )
        for method in made.methods
    ]


def test_bundle_extract_returns_all_method_signatures(tmp_path):
    signatures = {"f": Signature((X,), (Y,)), "g": Signature((Y,), (Y,))}
    vector = np.ones(3, np.float32)
    suites = [MethodTestSuite("f", [case()]), MethodTestSuite("g", [MethodTestCase([vector], [vector])])]
    made = Bundle.create(program(tmp_path), suites, signatures=signatures)
    (tmp_path / "out").mkdir()
    artifact = made.extract(tmp_path / "out")
    assert list(artifact.methods) == ["f", "g"]
    assert Bundle.create(artifact, suites_of(made)).digest == made.digest


def test_bundle_reads_method_signatures_from_executorch_program():
    files = {TWO_METHODS.name: TWO_METHODS}
    artifact = Artifact("executorch", TWO_METHODS.name, files, {}, "forward", "executorch")
    x = np.ones(3, np.float32)
    made = Bundle.create(artifact, [MethodTestSuite("both", [MethodTestCase([x, x], [x + x, x])])])
    assert [method.name for method in made.methods] == ["both", "forward"]
    with pytest.raises(UsageError, match="no method 'half'") as caught:
        Bundle.create(artifact, [MethodTestSuite("half", [])])
    assert "both, forward" in caught.value.hint


def test_with_cases_selects_by_name_number_and_method(tmp_path):
    (method,) = bundle(tmp_path, case(name="1"), case(name="other"), case(name="last")).methods

    def chosen(*wanted: str) -> list[str]:
        return [one.name for found in select_methods([method], wanted) for one in found.cases]

    assert chosen() == ["1", "other", "last"]
    assert chosen("1") == ["1"]  # a name takes precedence over a number
    assert chosen("2", "f/other") == ["other", "last"]
    for wrong in ("3", "g/other", "-1"):
        with pytest.raises(UsageError, match="not found"):
            chosen(wrong)


@pytest.mark.parametrize(
    ("accept", "message"),
    [
        (("y: python:judge.py:same",), "a Python function cannot be used here"),
        (("z: rmse<=1",), "unknown output 'z'"),
        (("rmse>=1",), "lower values are better"),
        (("top1>=0",), "cannot fail"),
    ],
)
def test_bundle_rejects_unusable_criteria(tmp_path, accept, message):
    with pytest.raises(UsageError, match=message):
        bundle(tmp_path, case(accept=accept))


def test_bundle_stores_criteria_of_case(tmp_path):
    bundle(tmp_path, case(accept=("y: rmse<=0.1", "kl<=1"))).save(tmp_path / "b.hilb")
    (found,) = Bundle.open(tmp_path / "b.hilb").methods[0].cases
    assert found.accept == ("y: rmse<=0.1", "kl<=1")
