"""Traces round-trip; invalid traces are rejected."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hil.controller.workloads.traces.trace import convert_to_numpy, list_arrays
from hil.errors import UsageError
from hil.testing import ModuleCall, Trace

DTYPES = st.sampled_from([np.float32, np.float64, np.float16, np.int8, np.uint64, np.bool_, np.complex64])
SHAPES = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
# numpy's text arrays drop trailing NULs.
TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=5)
ARRAYS = st.one_of(
    DTYPES.flatmap(lambda dtype: npst.arrays(dtype, SHAPES)),
    npst.arrays(np.float32, SHAPES).map(lambda array: array.astype(ml_dtypes.bfloat16)),
    st.lists(TEXTS, max_size=3).map(lambda texts: np.array([*texts, ""], dtype=object)),
)
LEAVES = st.one_of(ARRAYS, st.none(), st.booleans(), st.integers(), st.floats(), TEXTS)
STRUCTURES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(TEXTS, inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=2),
    ),
    max_leaves=8,
)


def same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and (
            list(one.flat) == list(other.flat) if one.dtype == object else one.tobytes() == other.tobytes()
        )  # fmt: skip
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def some_trace() -> Trace:
    call = ModuleCall("predict", (np.arange(6.0).reshape(2, 3), {"mask": [True]}), ({"logits": np.ones(3)},), 1e-3)
    return Trace("Model", "iree_llvmcpu", "once", "def once(module): ...", "sim: iree", [call, call])


@given(st.lists(STRUCTURES, max_size=2), st.lists(STRUCTURES, max_size=2), st.none() | st.floats(0, 0.9))
def test_call_round_trips_any_structure(inputs, outputs, rtol):
    call = ModuleCall("call", tuple(inputs), tuple(outputs), rtol, None)
    with tempfile.TemporaryDirectory() as folder:
        call.save(Path(folder))
        again = ModuleCall.load(Path(folder))
        assert not [path for path in Path(folder).iterdir() if path.suffix not in (".npy", ".json")]
    assert same(again.inputs, call.inputs) and same(again.outputs, call.outputs)
    assert (again.method, again.rtol, again.atol) == ("call", rtol, None)


def test_trace_round_trips_and_writes_log(tmp_path):
    trace = some_trace()
    folder = trace.save(tmp_path / "traces" / "once")
    again = Trace.load(f"{folder}/")
    assert str(again) == str(trace)
    assert again.calls[0].outputs[0]["logits"].tolist() == [1, 1, 1]
    assert [call.method for call in again] == ["predict", "predict"]
    log = (folder / "log.txt").read_text()
    assert "function once: 2 calls" in log and "0.logits: 3 float64" in log and "def once" in log
    for path in folder.rglob("*.npy"):
        np.load(path, allow_pickle=False)


def test_save_replaces_trace_but_not_other_files(tmp_path):
    trace = some_trace()
    trace.save(tmp_path / "trace")
    trace.calls.pop()
    trace.save(tmp_path / "trace")
    assert len(Trace.load(tmp_path / "trace").calls) == 1 and not (tmp_path / "trace" / "call_1").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(UsageError, match="contains other files than a trace"):
        trace.save(tmp_path / "mine")


def spoil(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("trace.json", {"schema": 7}, "unsupported trace version"),
        ("trace.json", {"calls": 3}, "missing call.json"),
        ("trace.json", {"calls": -1}, "invalid number of calls -1"),
        ("trace.json", {"calls": True}, "invalid calls 'True'"),
        ("trace.json", {"name": None}, "invalid name 'None'"),
        ("call_0/call.json", {"inputs": [{"npy": "../../x.npy", "dtype": "float32", "shape": [1]}]}, "invalid file"),
        ("call_0/call.json", {"inputs": [{"npy": "input_0.npy", "dtype": "int8", "shape": [6]}]}, r"expected \[6\]"),
        ("call_0/call.json", {"inputs": [{"npy": "input_0.npy", "dtype": "float64", "shape": [6]}]}, r"expected \[6\]"),
        ("call_0/call.json", {"outputs": [{"call": "rm"}]}, "unknown value"),
        ("call_0/call.json", {"outputs": [{"dict": [["a"]]}]}, "expected a key and a value"),
        ("call_0/call.json", {"outputs": [{"float": "much"}]}, "expected a number"),
        ("call_0/call.json", {"rtol": "0.1"}, "invalid rtol"),
    ],
)  # fmt: skip
def test_load_rejects_damaged_trace(tmp_path, file, changes, said):
    folder = some_trace().save(tmp_path / "trace")
    spoil(folder / file, **changes)
    with pytest.raises(UsageError, match=said):
        Trace.load(folder)


def test_load_rejects_deep_or_huge_trace(tmp_path):
    folder = some_trace().save(tmp_path / "trace")
    deep = '{"list": [' * 5000 + "]}" * 5000
    (folder / "call_1" / "call.json").write_text('{"method": "m", "outputs": [], "inputs": [' + deep + "]}")
    with pytest.raises(UsageError, match=r"nesting exceeds the limit|cannot be read"):
        Trace.load(folder)
    with (folder / "call_0" / "input_0.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (10**15, 3)})
    with pytest.raises(UsageError, match=r"more than there is memory for|not a readable"):
        Trace.load(folder)


def test_load_rejects_pickled_tensor(tmp_path):
    folder = some_trace().save(tmp_path / "trace")
    np.save(folder / "call_0" / "input_0.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(UsageError, match=r"not a readable \.npy"):
        Trace.load(folder)


def test_as_numpy_converts_framework_tensors():
    class Framework:
        def numpy(self):
            return np.float32(3)

    found = convert_to_numpy("x", {"b": [Framework(), 2], "a": (np.array([b"caf\xc3\xa9"], dtype=object), None)})
    assert found["b"][0].dtype == np.float32 and found["b"][0].shape == ()
    assert found["b"][1] == 2 and found["a"][0].tolist() == ["café"]
    assert list(list_arrays(found)) == ["a.0", "b.0"]
    with pytest.raises(UsageError, match=r"x\.b: unsupported type set"):
        convert_to_numpy("x", {"b": {1}})
    with pytest.raises(UsageError, match="unsupported key"):
        convert_to_numpy("x", {1.5: np.ones(1)})


def test_as_numpy_copies_array():
    array = np.ones(2)
    recorded = convert_to_numpy("x", array)
    array[:] = 7
    assert recorded.tolist() == [1, 1]
