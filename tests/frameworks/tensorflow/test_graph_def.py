"""TensorFlow 1 graphs in files, with and without tf2xla configs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.tfcompile_cache import TIMEOUT_S, run_hil

tensorflow = pytest.importorskip("tensorflow")
pytest.importorskip("ziglang")
from hil.controller.models.tensorflow.graph_def import open_graph
from hil.controller.models.tensorflow.source import describe, open_model
from hil.errors import ImportFailed, UsageError

pytestmark = pytest.mark.timeout(TIMEOUT_S)
tf = tensorflow.compat.v1

CONFIG = """
feed { id { node_name: "x_in" } shape { dim { size: 2 } dim { size: 3 } } name: "x" }
feed { id { node_name: "scope/y_in" } shape { dim { size: 3 } } }
fetch { id { node_name: "product" } name: "times" }
fetch { id { node_name: "sum" } name: "plus" }
"""


@pytest.fixture(scope="module")
def graphs(tmp_path_factory) -> Path:
    """Save a training step with Adam (``step``), operations with a config (``pair``), and a graph with a checkpoint."""
    folder = tmp_path_factory.mktemp("graphs")
    with tensorflow.Graph().as_default() as graph:
        x = tf.placeholder(tf.float32, [4, 3], name="x")
        with tf.variable_scope("fc1", use_resource=True):
            kernel = tf.get_variable("kernel", [3, 2])
        loss = tf.reduce_mean(tf.square(tf.matmul(x, kernel)), name="loss")
        tf.train.AdamOptimizer(0.1).minimize(loss, name="train")
        tf.global_variables_initializer()
        tf.train.Saver()
        write(graph, folder / "step.pbtxt")
    with tensorflow.Graph().as_default() as graph:
        x, y = tf.placeholder(tf.float32, [None, 3], name="x_in"), tf.placeholder(tf.float32, [3], name="scope/y_in")
        tf.add(x, y, name="sum")
        tf.multiply(x, y, name="product")
        write(graph, folder / "pair.pb")
    (folder / "pair.config.pbtxt").write_text(CONFIG)
    with tensorflow.Graph().as_default() as graph:
        held = tf.get_variable("held", initializer=tf.zeros([3]), use_resource=True)
        tf.add(tf.placeholder(tf.float32, [3], name="x"), held, name="y")
        write(graph, folder / "held.pb")
        with tf.Session() as session:
            session.run(held.assign([1.0, 2.0, 3.0], read_value=False))
            tf.train.Saver().save(session, str(folder / "held"), write_meta_graph=False)
    return folder


def write(graph, file: Path) -> None:
    definition = graph.as_graph_def(add_shapes=True)
    file.write_text(str(definition)) if file.suffix == ".pbtxt" else file.write_bytes(definition.SerializeToString())


def test_open_model_finds_feeds_fetches_and_variables(graphs):
    source = open_model(str(graphs / "step.pbtxt"), "", {})
    assert ([str(spec) for spec in source.inputs], source.name) == (["x: 4x3 float32"], "main")
    assert [spec.name for spec in source.outputs()] == ["loss"]
    slots = {"fc1/kernel/Adam", "fc1/kernel/Adam_1", "beta1_power", "beta2_power"}
    assert set(source.assigned) == {"fc1/kernel"} | slots
    kernel = source.assigned["fc1/kernel"]
    assert np.abs(kernel.numpy()).min() > 0
    # Every process draws the same random values.
    again = open_graph(graphs / "step.pbtxt", "").variables["fc1/kernel"]
    np.testing.assert_array_equal(kernel.numpy(), again.numpy())
    before = kernel.numpy()
    source.call([tensorflow.ones([4, 3])])
    np.testing.assert_allclose(
        np.abs(kernel.numpy() - before), 0.1, rtol=1e-3
    )  # the learning rate is Adam's first step


def test_open_graph_selects_named_operations(graphs):
    loss = open_graph(graphs / "step.pbtxt", "loss")
    assert [node.op for node in loss.definition.node if "Apply" in node.op] == []
    step = open_graph(graphs / "step.pbtxt", "fc1/kernel/Read/ReadVariableOp, loss:0,train")
    assert step.output_names == ["fc1/kernel/Read/ReadVariableOp", "loss"]
    assert [node.op for node in step.definition.node if "Apply" in node.op] == ["ResourceApplyAdam"]


def test_config_defines_inputs_and_outputs(graphs):
    found = describe(str(graphs / "pair.pb"), "", {})
    assert found["inputs"] == [["x", "float32", [2, 3]], ["scope/y_in", "float32", [3]]]
    assert [name for name, *_ in found["outputs"]] == ["times", "plus"]
    assert (found["function"], found["external"]) == ("pair.config.pbtxt", ["pair.config.pbtxt"])
    assert found["producer"]["functions"] == ["main", "pair.config.pbtxt"]
    # Without the config, all unused results are outputs and the shape stays open.
    plain = describe(str(graphs / "pair.pb"), "main", {})
    assert plain["inputs"][0] == ["x_in", "float32", ["x_in.dim0", 3]]
    assert [name for name, *_ in plain["outputs"]] == ["sum", "product"]


def test_variables_start_from_checkpoint_initializer_or_seed(graphs, tmp_path):
    held = open_graph(graphs / "held.pb", "")
    assert held.sources == {"held": "checkpoint"}
    np.testing.assert_array_equal(held.variables["held"].numpy(), [1, 2, 3])
    (tmp_path / "held.pb").write_bytes((graphs / "held.pb").read_bytes())
    alone = open_graph(tmp_path / "held.pb", "")
    assert alone.sources == {"held": "initialiser"} and not alone.variables["held"].numpy().any()
    bare = tf.GraphDef.FromString((graphs / "held.pb").read_bytes())
    kept = [node for node in bare.node if node.op != "AssignVariableOp"]
    (tmp_path / "bare.pb").write_bytes(tf.GraphDef(node=kept, versions=bare.versions).SerializeToString())
    seeded = open_graph(tmp_path / "bare.pb", "")
    assert seeded.sources == {"held": "seed"} and (seeded.variables["held"].numpy() > 0).all()


@pytest.mark.parametrize(
    ("name", "function", "error", "message"),
    [
        ("pair.pb", "sun", UsageError, "operation 'sun' not found in the graph"),
        ("pair.pb", "sum:1", UsageError, "output 1 of operation 'sum' not found"),
        ("pair.pb", "pear.config.pbtxt", UsageError, "config 'pear.config.pbtxt' not found in the directory"),
        ("broken.pbtxt", "", ImportFailed, "broken.pbtxt is not a GraphDef"),
        ("empty.pbtxt", "", ImportFailed, "empty.pbtxt is not a GraphDef: it contains no nodes"),
        ("feed.pb", "", ImportFailed, "invalid config feed.config.pbtxt: expected at least one fetch"),
        ("away.pb", "", UsageError, "away.config.pbtxt: operation 'gone' not found in the graph"),
        ("reference.pb", "", ImportFailed, "unsupported reference variable 'v'"),
    ],
)
def test_open_graph_rejects_invalid_function_or_file(graphs, tmp_path, name, function, error, message):
    (tmp_path / "broken.pbtxt").write_text("node { nam: 1 }")
    (tmp_path / "empty.pbtxt").write_text("versions { producer: 1 }")
    for stem, config in (
        ("pair", CONFIG),
        ("feed", 'feed { id { node_name: "x_in" } }'),
        ("away", 'fetch { id { node_name: "gone" } }'),
    ):
        (tmp_path / f"{stem}.pb").write_bytes((graphs / "pair.pb").read_bytes())
        (tmp_path / f"{stem}.config.pbtxt").write_text(config)
    with tensorflow.Graph().as_default() as graph:
        tf.disable_resource_variables()
        tf.add(tf.placeholder(tf.float32, [1], name="x"), tf.get_variable("v", [1], use_resource=False), name="y")
        tf.enable_resource_variables()
        write(graph, tmp_path / "reference.pb")
    with pytest.raises(error, match=message):
        open_graph(tmp_path / name, function)


def test_graph_compiles_with_both_compilers_and_program_runs(graphs, environment, shared_cache, tmp_path):
    def hil(*args: object) -> SimpleNamespace:
        return run_hil(*args, cwd=tmp_path, env=environment)

    step = graphs / "step.pbtxt"
    flag = "--compile-flag=--cpp_class=mynamespace::MyComputation"
    done = hil("run", step, "--runtime", "xla-aot", flag, "--debug-ir", "ir", "--debug-ir-passes", "--json")
    assert (done.code, done.case["outcome"]) == (0, "PASS"), done.err
    outputs = [output["name"] for output in done.case["verdicts"][0]["outputs"]]
    assert outputs[:2] == ["loss", "variable fc1/kernel"] and len(outputs) == 6
    assert "class MyComputation final" in (tmp_path / "ir" / "program.h").read_text()
    for name in ("before_optimizations", "after_optimizations"):
        assert (tmp_path / "ir" / "hlo" / f"{name}.txt").read_text().startswith("HloModule")
        assert (tmp_path / "ir" / "hlo" / f"{name}.dot").read_text().startswith("digraph")
    assert len(list((tmp_path / "ir" / "hlo" / "passes").iterdir())) > 3
    ports = json.loads((tmp_path / "ir" / "ports.json").read_text())
    assert {port["name"] for port in ports["variables"]} >= {"param_fc1_kernel", "param_fc1_kernel_Adam"}
    done = hil("run", step, "--debug-ir", "iree", "--json")
    assert (done.code, done.case["outcome"]) == (0, "PASS"), done.err
    assert "HloModule" in (tmp_path / "iree" / "hlo" / "after_optimizations.txt").read_text()
    assert "stablehlo." in (tmp_path / "iree" / "imported.mlir").read_text()
    # A stored program compiled with a config runs without the graph.
    assert hil("compile", graphs / "pair.pb", "--runtime", "xla-aot", "-o", "pair.so").code == 0
    np.savez(tmp_path / "in.npz", **{"x": np.full((2, 3), 2, np.float32), "scope/y_in": np.full(3, 5, np.float32)})
    np.savez(tmp_path / "out.npz", times=np.full((2, 3), 10, np.float32), plus=np.full((2, 3), 7, np.float32))
    assert hil("run", "pair.so", "--input", "in.npz", "--expected", "out.npz").code == 0
    np.savez(tmp_path / "out.npz", times=np.full((2, 3), 10, np.float32), plus=np.full((2, 3), 8, np.float32))
    assert hil("run", "pair.so", "--input", "in.npz", "--expected", "out.npz").code == 1
