"""A bundle holds what was put into it, and takes only what fits its program."""

from __future__ import annotations

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

from hil.bundles import Bundle, MethodTestCase, MethodTestSuite, Signature
from hil.bundles.cases import with_cases
from hil.controller.models.inputs import random_tensor
from hil.core.results import Artifact
from hil.core.tensors import DTYPES, TensorSpec, dtype_name
from hil.errors import StorageError, UsageError

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
specs = st.builds(TensorSpec, st.just(""), st.sampled_from(DTYPES), shapes)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    if dtype_name(one.dtype) == "string":
        return one.shape == other.shape and one.tolist() == other.tolist()
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@given(inputs=st.lists(specs, max_size=3), outputs=st.lists(specs, min_size=1, max_size=3), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_what_is_saved_is_what_is_opened(inputs, outputs, seed):
    inputs = [replace(spec, name=f"in {number}") for number, spec in enumerate(inputs)]
    outputs = [replace(spec, name=f"out {number}") for number, spec in enumerate(outputs)]
    given_, expected = ([random_tensor(spec, spec.shape, seed=seed) for spec in specs] for specs in (inputs, outputs))
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


def test_the_same_bundle_has_the_same_bytes_in_every_process(tmp_path):
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


def test_equal_tensors_are_stored_once(tmp_path):
    one, many = (bundle(tmp_path, *(case(500, name=str(n)) for n in range(count))) for count in (1, 50))
    assert many.head.size - one.head.size < 50 * 1000


def test_a_bundle_outlives_the_files_it_was_made_of(tmp_path):
    made = bundle(tmp_path)
    (tmp_path / "main.bin").unlink()
    made.save(tmp_path / "b.hilb")
    assert bytes(Bundle.open(tmp_path / "b.hilb").program.files["main.bin"]) == b"main.bin" * 7


def test_the_program_comes_out_as_it_went_in(tmp_path):
    (tmp_path / "out").mkdir()
    artifact = bundle(tmp_path).extract(tmp_path / "out")
    assert artifact.files[artifact.main].read_bytes() == b"main.bin" * 7
    assert (tmp_path / "out" / "weights" / "w.bin").read_bytes() == b"weights/w.bin" * 7
    with pytest.raises(StorageError):  # never over what is there
        bundle(tmp_path).extract(tmp_path / "out")


def test_a_file_that_is_changed_after_it_was_checked_gives_no_program(tmp_path):
    bundle(tmp_path).save(tmp_path / "b.hilb")
    opened = Bundle.open(tmp_path / "b.hilb")
    raw = (tmp_path / "b.hilb").read_bytes()
    with (tmp_path / "b.hilb").open("r+b") as file:
        file.seek(raw.index(b"main.bin" * 7))
        file.write(b"evil")
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="was changed"):
        opened.extract(tmp_path / "out")


@pytest.mark.parametrize("rtol", [10**400, "much", -1, float("nan")])
def test_a_tolerance_that_is_no_number_is_refused(tmp_path, rtol):
    with pytest.raises(UsageError, match=r"method 'f', case 0: .*tol"):
        bundle(tmp_path, case(rtol=rtol))


def test_a_full_folder_is_told(tmp_path):
    with pytest.raises(StorageError, match="cannot be written"):
        bundle(tmp_path).save(tmp_path / "missing" / "b.hilb")


F32 = np.float32
WRONG = {
    "method 'f', case 1, input 'x' is 3x4 float32, the method takes Nx2 float32": MethodTestCase(
        [np.ones((3, 4), F32)], [np.ones(3, F32)]
    ),
    "method 'f', case 1, input 'x' is 6 float32": MethodTestCase([np.ones(6, F32)], [np.ones(3, F32)]),
    "input 'x' is 3x2 int32, the method takes Nx2 float32": MethodTestCase([np.ones((3, 2), "i4")], [np.ones(3, F32)]),
    "input 'x' is 3x2 float64": MethodTestCase([np.ones((3, 2))], [np.ones(3, F32)]),
    "2 inputs are given, the method has 1": MethodTestCase([np.ones((3, 2), F32)] * 2, [np.ones(3, F32)]),
    "0 inputs are given": MethodTestCase([], [np.ones(3, F32)]),
    "0 outputs are given": MethodTestCase([np.ones((3, 2), F32)], []),
    "the method has no input 'z'": MethodTestCase({"z": np.ones((3, 2), F32)}, [np.ones(3, F32)]),
    "input 'x' is missing": MethodTestCase({}, [np.ones(3, F32)]),
    "output 'y' has 4 where dimension 'N' is 3, as input 'x' has it": MethodTestCase(
        [np.ones((3, 2), F32)], [np.ones(4, F32)]
    ),
    "case 1 ('odd'), output 'y' is 3x1 float32": MethodTestCase(
        [np.ones((3, 2), F32)], [np.ones((3, 1), F32)], name="odd"
    ),
    "rtol is 2": MethodTestCase([np.ones((3, 2), F32)], [np.ones(3, F32)], rtol=2),
    "it would agree with every sign flipped": MethodTestCase([np.ones((3, 2), F32)], [np.ones(3, F32)], atol=3),
    "atol is nan": MethodTestCase([np.ones((3, 2), F32)], [np.ones(3, F32)], atol=float("nan")),
    "another case has this name": MethodTestCase([np.ones((3, 2), F32)], [np.ones(3, F32)], name="0"),
    "is no array": MethodTestCase([[[1.0], [1.0, 2.0]]], [np.ones(3, F32)]),
    "holds Python objects": MethodTestCase([np.array([None, None], object)], [np.ones(3, F32)]),
    "tensors of dtype": MethodTestCase([np.ones((3, 2), "M8[s]")], [np.ones(3, F32)]),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_case_that_does_not_fit_is_named_exactly(tmp_path, message):
    with pytest.raises(UsageError) as caught:
        bundle(tmp_path, case(), WRONG[message])
    assert message in caught.value.message
    assert "method 'f', case 1" in caught.value.message


def test_a_case_whose_tolerance_tells_nothing_gets_a_hint_that_a_bundle_can_follow(tmp_path):
    with pytest.raises(UsageError) as caught:
        bundle(tmp_path, WRONG["it would agree with every sign flipped"])
    assert caught.value.hint == "give the case a smaller tolerance"


def test_a_method_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    with pytest.raises(UsageError, match="no method 'forwards'") as caught:
        Bundle.create(program(tmp_path), [MethodTestSuite("forwards", [case()])])
    assert "it has f" in caught.value.hint


def test_methods_may_be_without_cases_but_a_bundle_may_not(tmp_path):
    artifact = program(tmp_path)
    signature = Signature((X,), (Y,))
    two = Bundle.create(artifact, [MethodTestSuite("f", [case()])], signatures={"f": signature, "g": signature})
    assert [len(method.cases) for method in two.methods] == [1, 0]
    with pytest.raises(UsageError, match="verifies nothing"):
        Bundle.create(artifact, [MethodTestSuite("f", [])])


def test_a_signature_that_only_a_board_knows_is_asked_for(tmp_path):
    artifact = replace(program(tmp_path), inputs=None)
    with pytest.raises(UsageError, match="only a board can tell"):
        Bundle.create(artifact, [MethodTestSuite("f", [case()])])


@pytest.mark.parametrize(
    ("dtype", "number"), [("float32", 0.5), ("bfloat16", 0.5), ("int8", -3), ("uint4", 15), ("bool", True)]
)
def test_a_bare_number_is_taken_for_a_scalar_of_its_kind(tmp_path, dtype, number):
    scalar = TensorSpec("s", dtype, ())
    made = Bundle.create(
        program(tmp_path, [scalar], [scalar]), [MethodTestSuite("f", [MethodTestCase([number], [number])])]
    )
    assert made.methods[0].cases[0].inputs["s"].item() == number


@pytest.mark.parametrize(("dtype", "number"), [("int8", 300), ("uint8", -1), ("int4", 9), ("int32", 0.5), ("bool", 1)])
def test_a_bare_number_that_the_dtype_does_not_hold_is_refused(tmp_path, dtype, number):
    scalar = TensorSpec("s", dtype, ())
    with pytest.raises(UsageError, match="input 's'"):
        Bundle.create(program(tmp_path, [scalar], [scalar]), [MethodTestSuite("f", [MethodTestCase([number], [0])])])


def test_open_dimensions_without_a_name_may_differ(tmp_path):
    spec = TensorSpec("x", "bfloat16", (None, None))
    value = np.ones((2, 3), ml_dtypes.bfloat16)
    made = Bundle.create(
        program(tmp_path, [spec], [spec]), [MethodTestSuite("f", [MethodTestCase([value], [value.T])])]
    )
    assert made.methods[0].signature.inputs == (spec,)


@pytest.mark.parametrize(
    "made", [{"x": object()}, {"x": float("nan")}, {"x": "\ud800"}, {"x": eval("[" * 40 + "]" * 40)}]
)
def test_what_json_cannot_say_of_its_making_is_refused(tmp_path, made):
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


def test_what_is_extracted_knows_all_methods_as_the_bundle_does(tmp_path):
    signatures = {"f": Signature((X,), (Y,)), "g": Signature((Y,), (Y,))}
    vector = np.ones(3, np.float32)
    suites = [MethodTestSuite("f", [case()]), MethodTestSuite("g", [MethodTestCase([vector], [vector])])]
    made = Bundle.create(program(tmp_path), suites, signatures=signatures)
    (tmp_path / "out").mkdir()
    artifact = made.extract(tmp_path / "out")
    assert list(artifact.methods) == ["f", "g"]
    assert Bundle.create(artifact, suites_of(made)).digest == made.digest


def test_executorchs_program_tells_all_its_methods_itself():
    files = {TWO_METHODS.name: TWO_METHODS}
    artifact = Artifact("executorch", TWO_METHODS.name, files, {}, "forward", "executorch")
    x = np.ones(3, np.float32)
    made = Bundle.create(artifact, [MethodTestSuite("both", [MethodTestCase([x, x], [x + x, x])])])
    assert [method.name for method in made.methods] == ["both", "forward"]
    with pytest.raises(UsageError, match="no method 'half'") as caught:
        Bundle.create(artifact, [MethodTestSuite("half", [])])
    assert "both, forward" in caught.value.hint


def test_cases_are_chosen_by_name_by_number_and_with_their_method(tmp_path):
    (method,) = bundle(tmp_path, case(name="1"), case(name="other"), case(name="last")).methods

    def chosen(*wanted: str) -> list[str]:
        return [one.name for found in with_cases([method], wanted) for one in found.cases]

    assert chosen() == ["1", "other", "last"]
    assert chosen("1") == ["1"]  # a name comes before a number
    assert chosen("2", "f/other") == ["other", "last"]
    for wrong in ("3", "g/other", "-1"):
        with pytest.raises(UsageError, match="no case"):
            chosen(wrong)


@pytest.mark.parametrize(
    ("accept", "message"),
    [
        (("y: python:judge.py:same",), "a Python function cannot be used here"),
        (("z: rmse<=1",), "names output 'z'"),
        (("rmse>=1",), "lower values are better"),
        (("top1>=0",), "cannot fail"),
    ],
)
def test_bundle_refuses_criteria_it_cannot_judge(tmp_path, accept, message):
    with pytest.raises(UsageError, match=message):
        bundle(tmp_path, case(accept=accept))


def test_bundle_keeps_the_criteria_of_a_case(tmp_path):
    bundle(tmp_path, case(accept=("y: rmse<=0.1", "kl<=1"))).save(tmp_path / "b.hilb")
    (found,) = Bundle.open(tmp_path / "b.hilb").methods[0].cases
    assert found.accept == ("y: rmse<=0.1", "kl<=1")
