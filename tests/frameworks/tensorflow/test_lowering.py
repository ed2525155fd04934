"""TensorFlow functions as StableHLO: arguments, variables, nesting, and results on IREE."""

from __future__ import annotations

import numpy as np
import pytest

from hil.errors import CompileFailed

tf = pytest.importorskip("tensorflow")

from iree import runtime
from iree.compiler import tools

from hil.controller.models.conversions.tensorflow_program import freeze, prepare
from hil.controller.models.tensorflow.graphs import find_assigned, iter_leaves, number_leaves, restore
from hil.controller.models.tensorflow.lower import CapturedFunction, flatten, lower_function

CONFIG = runtime.Config("local-sync")


class Model(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(tf.ones([4, 3]), name="weight")
        self.count = tf.Variable(0, name="count")
        self.shift = tf.constant([[1.0, 2.0, 3.0]]) + tf.random.uniform([1, 3])

    @tf.function
    def step(self, given, power=1):
        self.count.assign_add(1)
        self.weight.assign_sub(0.5 * tf.ones([4, 3]))
        product = given["x"] @ self.weight + given["y"][0] + self.shift
        return {"product": product**power, "nothing": None, "pair": (self.count.read_value(), given["x"])}

    @tf.function
    def apply(self, x):
        return x @ self.weight + self.shift


def call(mlir: str | bytes, name: str, *args) -> list[np.ndarray]:
    """Compile a module for the CPU with IREE and call a function."""
    flags = ["--iree-llvmcpu-target-cpu=host", "--iree-input-demote-f64-to-f32=false"]
    program = tools.compile_str(mlir, target_backends=["llvm-cpu"], extra_args=flags)
    module = runtime.load_vm_module(runtime.VmModule.copy_buffer(CONFIG.vm_instance, program), CONFIG)
    results = module[name](*args)
    return [np.asarray(result) for result in (results if isinstance(results, (list, tuple)) else [results])]


def called(live: CapturedFunction, *args) -> list[np.ndarray]:
    return call(prepare(live.function.mlir), "main", *flatten(args), *live.values())


def test_lower_exposes_state_as_inputs_and_outputs():
    model = Model()
    given = {"x": np.random.rand(2, 4).astype(np.float32), "y": [np.ones(3, np.float32)]}
    live = lower_function(model.step, (given, 2))
    function = live.function
    assert [str(spec) for spec in function.inputs] == ["given.x: 2x4 float32", "given.y.0: 3 float32"]
    assert [spec.name for spec in function.outputs] == ["pair.0", "pair.1", "product"]
    assert {state.spec.name: (state.constant, state.result is not None) for state in function.state} == {
        "count": (False, True),
        "weight": (False, True),
        "captured": (True, False),
    }
    results = called(live, given, 2)
    wanted = model.step({"x": tf.constant(given["x"]), "y": [tf.constant(given["y"][0])]}, 2)
    got = function.nest_outputs(results[: len(function.outputs)])
    assert got["nothing"] is None
    np.testing.assert_allclose(got["product"], wanted["product"], rtol=1e-5)
    np.testing.assert_array_equal(got["pair"][1], given["x"])
    assert got["pair"][0] == 1
    for state in function.assigned:
        np.testing.assert_allclose(results[state.result], live.captured[function.state.index(state)].numpy())


def test_freeze_turns_read_only_variables_into_constants():
    model = Model()
    x = np.random.rand(2, 4).astype(np.float32)
    live = lower_function(model.apply, (x,))
    (result,) = call(freeze(live.function, live.values(), "apply"), "apply", x)
    np.testing.assert_allclose(result, model.apply(x), rtol=1e-5)


def test_frozen_function_restarts_state_per_call():
    model = Model()
    given = {"x": np.random.rand(2, 4).astype(np.float32), "y": [np.ones(3, np.float32)]}
    live = lower_function(model.step, (given,))
    with pytest.raises(CompileFailed, match="does not return: weight"):
        freeze(live.function, live.values(), "step", ["count"])
    program = freeze(live.function, live.values(), "step", ["weight", "count"])
    for _ in range(2):
        *outputs, weight, count = call(program, "step", *flatten((given,)))
        assert len(outputs) == len(live.function.outputs) and count == 1
        np.testing.assert_array_equal(weight, np.full([4, 3], 0.5, np.float32))


def test_assigned_finds_variables_in_nested_graphs():
    read, set_, nested, looped, branched, scattered = (tf.Variable([float(n)], name=f"v{n}") for n in range(6))
    generator = tf.random.Generator.from_seed(1)

    @tf.function
    def inner(x, deeper):
        return nested.assign_add(x) if deeper else inner(x, True) * read

    @tf.function
    def step(x):
        for _ in tf.range(3):
            looped.assign_add(x)
        if tf.reduce_sum(x) > 0:
            branched.assign(x * read)
        scattered.scatter_nd_update([[0]], x)
        set_.assign(set_)
        return inner(x, False) + generator.uniform([1]) + read[0] + tf.gather(read, 0)

    concrete = step.get_concrete_function(tf.TensorSpec([1]))
    assert set(find_assigned(concrete)) == {"v1", "v2", "v3", "v4", "v5", "StateVar"}
    # XLA returns no new value for an unchanged variable; freeze returns it if requested.
    live = lower_function(lambda x: [set_.assign(set_), x][1], (np.ones(1, np.float32),))
    program = freeze(live.function, live.values(), "main", ["v1"])
    assert [value.item() for value in call(program, "main", np.full(1, 7, np.float32))] == [7.0, 1.0]


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"]
)
def test_freeze_supports_constants_of_all_dtypes(dtype):
    held = tf.Variable(tf.cast([[0, 1, 2], [3, 1, 0]], dtype))
    live = lower_function(lambda x: (tf.concat([held, x], 0), tf.shape(x)), (tf.TensorSpec([1, 3], dtype),))
    x = np.ones([1, 3], held.numpy().dtype)
    if dtype == "bfloat16":  # IREE's Python does not accept bfloat16
        assert live.function.outputs[0].dtype == "bfloat16"
        return
    joined, shape = call(freeze(live.function, live.values(), "main"), "main", x)
    np.testing.assert_array_equal(joined.astype(np.float64), np.concatenate([held.numpy(), x]).astype(np.float64))
    assert shape.tolist() == [1, 3]


def test_lower_handles_lstm_and_swapped_loop_variables():
    """IREE 3.13 needs unrolled steps for the LSTM, and an unchanged loop for the second function."""
    tf.keras.utils.set_random_seed(0)
    lstm = tf.keras.Sequential([tf.keras.Input([8, 4]), tf.keras.layers.LSTM(4)])
    x = np.random.rand(1, 8, 4).astype(np.float32)
    live = lower_function(lstm, (x,))
    assert not {"cf.br", "stablehlo.while"} & set(prepare(live.function.mlir).replace("(", " ").split())
    np.testing.assert_allclose(called(live, x)[0], lstm(x), atol=1e-5)

    @tf.function
    def fibonacci(n):
        first, second = tf.constant(0), tf.constant(1)
        for _ in tf.range(n):
            first, second = second, first + second
        return first

    assert called(lower_function(fibonacci, (np.int32(20),)), np.int32(20)) == [6765]


TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [3.0, 4.0], tf.int64), 0.0)


@pytest.mark.parametrize(
    ("function", "spec", "words"),
    [
        (lambda x: tf.strings.length(x), tf.TensorSpec([2], tf.string), "cannot lower|unsupported dtype"),
        (lambda x: tf.py_function(abs, [x], tf.float32), tf.TensorSpec([4]), r"unsupported operations .*EagerPyFunc"),
        (lambda x: tf.sparse.from_dense(x), tf.TensorSpec([4]), "SparseTensor"),
        (lambda x: x @ x, tf.TensorSpec([2, 3]), r"ValueError: Dimensions must be equal, but are 3 and 2"),
        (lambda x: None, tf.TensorSpec([2]), "no outputs and assigns no variables"),
        (lambda x: 1 / 0, tf.TensorSpec([2]), "ZeroDivisionError"),
        (TABLE.lookup, tf.TensorSpec([2], tf.int64), "unsupported resource in the function"),
    ],
)
def test_lower_explains_failure(function, spec, words):
    with pytest.raises(CompileFailed, match=words):
        lower_function(function, (spec,))


def test_leaves_match_tensorflow_flattening():
    structure = {"b": [1.0, (2.0, None)], "a": {"z": 3.0, "c": 4.0}}
    assert [leaf for _, leaf in iter_leaves(structure)] == tf.nest.flatten(structure)
    assert [path for path, _ in iter_leaves(structure)] == ["a.c", "a.z", "b.0", "b.1.0", "b.1.1"]
    places = number_leaves(structure)
    assert places == {"b": [2, (3, None)], "a": {"z": 1, "c": 0}}
    assert restore(places, [4.0, 3.0, 1.0, 2.0]) == structure
