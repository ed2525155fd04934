from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.waiting import allowed_s

from hil.controller.models.importers import import_model
from hil.controller.models.importers.onnx_nodes import label_node
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.core.tensors import TensorSpec
from hil.errors import ImportFailed, UsageError
from hil.formats.ort_values import ONNX_TYPES

Save = Callable[..., Path]
FLOAT, INT64, UINT8 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8


def relu(save: Save, shape: tuple[object, ...] = (2, 3), **options: object) -> Path:
    node = helper.make_node("Relu", ["x"], ["y"], name="act")
    return save([node], [("x", FLOAT, shape)], [("y", FLOAT, shape)], **options)


def tensor(name: str, array: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(array, name)


def externalise(path: Path, location: str, offset: int = 0) -> None:
    """Move the data of the model's first initializer to an external file."""
    model = onnx.load(path, load_external_data=False)
    first = model.graph.initializer[0]
    size = len(first.raw_data)
    first.ClearField("raw_data")
    first.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(size))):
        entry = first.external_data.add()
        entry.key, entry.value = key, value
    onnx.save(model, path)


def with_weight(save: Save) -> Path:
    node = helper.make_node("Add", ["x", "w"], ["y"])
    return save([node], [("x", FLOAT, (4,))], [("y", FLOAT, (4,))], [tensor("w", np.ones(4, np.float32))])


def test_import_reads_signature_name_and_digest(save_onnx: Save, isolated: Isolated) -> None:
    model = import_model(relu(save_onnx), isolated=isolated)
    assert model.inputs == (TensorSpec("x", "float32", (2, 3)),)
    assert model.outputs == (TensorSpec("y", "float32", (2, 3)),)
    assert (model.name, model.format, model.function) == ("model", "onnx", "net")
    assert list(model.files) == ["model.onnx"] and model.digest.startswith("blake3:")
    assert model.producer["opsets"] == {"ai.onnx": 17}


@pytest.mark.ci
def test_import_without_pool_starts_process(save_onnx: Save) -> None:
    assert import_model(relu(save_onnx)).outputs


@pytest.mark.parametrize("dtype", [name for name in ONNX_TYPES if name not in ("complex64", "complex128")])
def test_import_reads_every_dtype(save_onnx: Save, isolated: Isolated, dtype: str) -> None:
    number = ONNX_TYPES[dtype]
    node = helper.make_node("Identity", ["x"], ["y"])
    path = save_onnx([node], [("x", number, (3,))], [("y", number, (3,))], opset=25)
    assert import_model(path, isolated=isolated).inputs == (TensorSpec("x", dtype, (3,)),)


def test_import_preserves_or_fixes_symbolic_dimensions(save_onnx: Save, isolated: Isolated) -> None:
    path = relu(save_onnx, ("N", 3))
    assert import_model(path, isolated=isolated).inputs == (TensorSpec("x", "float32", ("N", 3)),)
    fixed = import_model(path, dims={"N": 5}, isolated=isolated)
    assert fixed.inputs == (TensorSpec("x", "float32", (5, 3)),)
    assert fixed.outputs == (TensorSpec("y", "float32", (5, 3)),)
    assert fixed.dims == {"N": 5}
    with pytest.raises(UsageError, match="no dimension 'M'") as caught:
        import_model(path, dims={"M": 5}, isolated=isolated)
    assert "N" in caught.value.hint
    with pytest.raises(UsageError, match="negative"):
        import_model(path, dims={"N": -1}, isolated=isolated)


def test_import_names_unnamed_dimension(save_onnx: Save, isolated: Isolated) -> None:
    path = relu(save_onnx, (None, 3))
    assert import_model(path, isolated=isolated).inputs == (TensorSpec("x", "float32", ("x.dim0", 3)),)
    assert import_model(path, dims={"x.dim0": 2}, isolated=isolated).inputs == (TensorSpec("x", "float32", (2, 3)),)


def test_import_infers_output_shapes(save_onnx: Save, isolated: Isolated) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path = save_onnx(nodes, [("x", FLOAT, ("N", 4))], [("y", FLOAT, None)], [tensor("w", np.zeros((4, 5), np.float32))])
    assert import_model(path, dims={"N": 2}, isolated=isolated).outputs == (TensorSpec("y", "float32", (2, 5)),)


def test_import_excludes_initializers_from_inputs(save_onnx: Save, isolated: Isolated) -> None:
    node = helper.make_node("Add", ["x", "w"], ["y"])
    weight = tensor("w", np.ones(4, np.float32))
    path = save_onnx([node], [("x", FLOAT, (4,)), ("w", FLOAT, (4,))], [("y", FLOAT, (4,))], [weight])
    assert [spec.name for spec in import_model(path, isolated=isolated).inputs or ()] == ["x"]


def test_import_accepts_empty_tensors_and_many_outputs(save_onnx: Save, isolated: Isolated) -> None:
    constant = helper.make_node("Constant", [], ["c"], value=tensor("", np.float32(1)))
    empty = helper.make_node("Identity", ["e"], ["f"])
    many = [helper.make_node("Identity", ["c"], [f"y{i}"]) for i in range(100)]
    outputs = [*((f"y{i}", FLOAT, ()) for i in range(100)), ("f", FLOAT, (0, 2))]
    model = import_model(save_onnx([constant, empty, *many], [("e", FLOAT, (0, 2))], outputs), isolated=isolated)
    assert len(model.outputs or ()) == 101 and (model.outputs or ())[99].shape == ()
    assert model.inputs == (TensorSpec("e", "float32", (0, 2)),)
    none = import_model(save_onnx([constant], [], [("c", FLOAT, ())], name="none.onnx"), isolated=isolated)
    assert none.inputs == ()


def test_import_accepts_functions_and_other_domains(save_onnx: Save, isolated: Isolated) -> None:
    double = helper.make_function(
        "mine", "Double", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    nodes = [
        helper.make_node("Double", ["x"], ["h"], domain="mine"),
        helper.make_node("Gelu", ["h"], ["y"], domain="com.microsoft"),
    ]
    path = save_onnx(
        nodes, [("x", FLOAT, (2,))], [("y", FLOAT, (2,))], functions=[double], domains=("mine", "com.microsoft")
    )
    assert import_model(path, isolated=isolated).outputs == (TensorSpec("y", "float32", (2,)),)


def test_import_accepts_graph_name_as_function(save_onnx: Save, isolated: Isolated) -> None:
    path = relu(save_onnx)
    for name in ("", "net", "main_graph"):
        assert import_model(path, function=name, isolated=isolated).function == "net"
    with pytest.raises(UsageError, match="no function 'other'") as caught:
        import_model(path, function="other", isolated=isolated)
    assert "net" in caught.value.hint


# --- external data ---


def test_import_includes_external_data_in_digest(save_onnx: Save, isolated: Isolated, tmp_path: Path) -> None:
    path = with_weight(save_onnx)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(np.ones(4, np.float32).tobytes())
    externalise(path, "sub/w.bin")
    model = import_model(path, isolated=isolated)
    assert dict(model.files) == {"model.onnx": path, "sub/w.bin": tmp_path / "sub" / "w.bin"}
    assert [spec.name for spec in model.inputs or ()] == ["x"]
    (tmp_path / "sub" / "w.bin").write_bytes(np.zeros(4, np.float32).tobytes())
    assert import_model(path, isolated=isolated).digest != model.digest


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("w.bin", "external data 'w.bin' of model.onnx is missing"),
        ("../w.bin", "is outside the model's directory"),
        ("a/../../w.bin", "is outside the model's directory"),
        ("/etc/passwd", "is outside the model's directory"),
        ("..\\w.bin", "is outside the model's directory"),
    ],
)
def test_import_rejects_missing_or_outside_external_data(
    save_onnx: Save, isolated: Isolated, tmp_path: Path, location: str, words: str
) -> None:
    path = with_weight(save_onnx)
    (tmp_path.parent / "w.bin").write_bytes(bytes(16))
    externalise(path, location)
    with pytest.raises(ImportFailed, match=words):
        import_model(path, isolated=isolated)


def test_import_rejects_truncated_external_data(save_onnx: Save, isolated: Isolated, tmp_path: Path) -> None:
    path = with_weight(save_onnx)
    (tmp_path / "w.bin").write_bytes(bytes(15))
    externalise(path, "w.bin")
    with pytest.raises(ImportFailed, match=r"tensor 'w' is truncated: w.bin has 15 of 16 bytes"):
        import_model(path, isolated=isolated)


def linked(folder: Path, save: Save, data: bytes) -> Path:
    """Store a model and its data like the Hugging Face Hub cache: links to files named by digest."""
    path = with_weight(save)
    externalise(path, "w.bin")
    snapshot, blobs = folder / "hub" / "snapshots" / "1a2b", folder / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    path.rename(blobs / "aaaa")
    (blobs / "bbbb").write_bytes(data)
    (snapshot / "model.onnx").symlink_to("../../blobs/aaaa")
    (snapshot / "w.bin").symlink_to("../../blobs/bbbb")
    return snapshot / "model.onnx"


def test_import_accepts_linked_external_data(save_onnx: Save, isolated: Isolated, tmp_path: Path) -> None:
    path = linked(tmp_path, save_onnx, np.ones(4, np.float32).tobytes())
    assert dict(import_model(path, isolated=isolated).files) == {"model.onnx": path, "w.bin": path.with_name("w.bin")}
    (tmp_path / "hub" / "blobs" / "bbbb").write_bytes(bytes(3))
    with pytest.raises(ImportFailed, match=r"w\.bin has 3 of 16 bytes"):
        import_model(path, isolated=isolated)


def test_import_rejects_external_data_linked_outside(save_onnx: Save, isolated: Isolated, tmp_path: Path) -> None:
    path = linked(tmp_path, save_onnx, bytes(16))
    (tmp_path / "secret").write_bytes(bytes(16))
    path.with_name("w.bin").unlink()
    path.with_name("w.bin").symlink_to(tmp_path / "secret")
    with pytest.raises(ImportFailed, match="points outside"):
        import_model(path, isolated=isolated)


# --- invalid files ---


def test_invalid_path_raises_usage_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.onnx")
    (tmp_path / "sparse.onnx").touch()
    os.truncate(tmp_path / "sparse.onnx", 1 << 40)
    for path, words in (
        (tmp_path / "no.onnx", "no such file"),
        (tmp_path, "is a directory"),
        (tmp_path / "pipe.onnx", "is not a regular file"),
        (tmp_path / "sparse.onnx", "has 1099511627776 bytes"),
        (tmp_path / f"{'a' * 300}.onnx", r"cannot open .*: File name too long"),
    ):
        with pytest.raises(UsageError, match=words):
            import_model(path)
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(UsageError, match="unsupported model format: ") as caught:
        import_model(tmp_path / "x.txt")
    assert ".onnx" in caught.value.hint


def test_empty_file_raises_import_error(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    with pytest.raises(ImportFailed, match="is empty"):
        import_model(tmp_path / "m.onnx")


def test_random_and_truncated_bytes_raise_import_error(save_onnx: Save, isolated: Isolated, tmp_path: Path) -> None:
    whole = with_weight(save_onnx).read_bytes()
    generator = random.Random(0)
    samples = [generator.randbytes(size) for size in (1, 2, 10, 100, 1000)]
    samples += [whole[:size] for size in range(1, len(whole), 7)]
    path = tmp_path / "broken.onnx"
    for sample in samples:
        path.write_bytes(sample)
        with pytest.raises(ImportFailed):
            import_model(path, isolated=isolated)


def test_flipped_byte_never_causes_traceback(save_onnx: Save, isolated: Isolated, tmp_path: Path) -> None:
    whole = with_weight(save_onnx).read_bytes()
    path = tmp_path / "flipped.onnx"
    for position in range(0, len(whole), 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x5A]) + whole[position + 1 :])
        try:
            import_model(path, isolated=isolated)
        except ImportFailed as error:
            assert "Traceback" not in error.message


def test_missing_outputs_raise_import_error(save_onnx: Save, isolated: Isolated) -> None:
    path = save_onnx([helper.make_node("Relu", ["x"], ["y"])], [("x", FLOAT, (2,))], [])
    with pytest.raises(ImportFailed, match="no outputs"):
        import_model(path, isolated=isolated)


@pytest.mark.parametrize("inside", [False, True])
def test_unknown_operator_error_names_node(save_onnx: Save, isolated: Isolated, inside: bool) -> None:
    node = helper.make_node("Frobnicate", ["x"], ["y"], name="frob")
    nodes = [node]
    if inside:
        branch = helper.make_graph([node], "branch", [], [helper.make_tensor_value_info("y", FLOAT, (2,))])
        nodes = [
            helper.make_node("Constant", [], ["c"], value=tensor("", np.array(True))),
            helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch),
        ]
    path = save_onnx(nodes, [("x", FLOAT, (2,))], [("y", FLOAT, (2,))])
    with pytest.raises(ImportFailed, match=r"unsupported operator 'Frobnicate' of node 'frob': not in ai\.onnx 17"):
        import_model(path, isolated=isolated)


def test_operator_newer_than_opset_raises_import_error(save_onnx: Save, isolated: Isolated) -> None:
    path = save_onnx([helper.make_node("Gelu", ["x"], ["y"])], [("x", FLOAT, (2,))], [("y", FLOAT, (2,))], opset=17)
    with pytest.raises(ImportFailed, match="unsupported operator 'Gelu' of the node with outputs y"):
        import_model(path, isolated=isolated)


def test_unknown_opset_raises_import_error(save_onnx: Save, isolated: Isolated) -> None:
    with pytest.raises(ImportFailed, match="opset 99"):
        import_model(relu(save_onnx, opset=99), isolated=isolated)


def test_import_accepts_onnxruntime_operator_in_onnx_domain(save_onnx: Save, isolated: Isolated) -> None:
    node = helper.make_node("SimplifiedLayerNormalization", ["x", "w"], ["y"])
    path = save_onnx([node], [("x", FLOAT, (2, 4))], [("y", FLOAT, (2, 4))], [tensor("w", np.ones(4, np.float32))])
    assert import_model(path, isolated=isolated).outputs == (TensorSpec("y", "float32", (2, 4)),)


def test_undefined_value_raises_import_error(save_onnx: Save, isolated: Isolated) -> None:
    path = save_onnx([helper.make_node("Relu", ["nowhere"], ["y"])], [("x", FLOAT, (2,))], [("y", FLOAT, (2,))])
    with pytest.raises(ImportFailed, match="nowhere"):
        import_model(path, isolated=isolated)


def test_non_tensor_input_raises_import_error(tmp_path: Path, isolated: Isolated) -> None:
    kind = helper.make_tensor_type_proto(FLOAT, [2])
    for what, proto in (
        ("sequence", helper.make_sequence_type_proto(kind)),
        ("optional", helper.make_optional_type_proto(kind)),
        ("map", helper.make_map_type_proto(INT64, kind)),
        ("sparse tensor", helper.make_sparse_tensor_type_proto(FLOAT, [2])),
    ):
        graph = helper.make_graph(
            [helper.make_node("Identity", ["x"], ["y"])],
            "net",
            [helper.make_value_info("x", proto)],
            [helper.make_value_info("y", proto)],
        )
        onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
        with pytest.raises(ImportFailed, match=f"input 'x' has unsupported type {what}"):
            import_model(tmp_path / "m.onnx", isolated=isolated)


def test_input_without_shape_raises_import_error(save_onnx: Save, isolated: Isolated) -> None:
    path = save_onnx([helper.make_node("Relu", ["x"], ["y"])], [("x", FLOAT, None)], [("y", FLOAT, None)])
    with pytest.raises(ImportFailed, match="input 'x' has no shape"):
        import_model(path, isolated=isolated)


# --- ranges ---


def test_index_range_follows_table_size(save_onnx: Save, isolated: Isolated) -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["ids", "axes"], ["wide"]),
        helper.make_node("Gather", ["table", "wide"], ["y"], axis=0),
    ]
    path = save_onnx(
        nodes,
        [("ids", INT64, (3,))],
        [("y", FLOAT, (1, 3, 2))],
        [tensor("table", np.zeros((7, 2), np.float32)), tensor("axes", np.array([0]))],
    )
    assert import_model(path, isolated=isolated).ranges == {"ids": (0, 6)}


def test_index_range_follows_large_table(save_onnx: Save, isolated: Isolated) -> None:
    node = helper.make_node("Gather", ["table", "ids"], ["y"], axis=1)
    table = tensor("table", np.zeros((2, 50_000), np.float32))
    path = save_onnx([node], [("ids", INT64, (3,))], [("y", FLOAT, (2, 3))], [table])
    assert import_model(path, isolated=isolated).ranges == {"ids": (0, 49_999)}


def test_quantize_and_clip_set_input_ranges(save_onnx: Save, isolated: Isolated) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["a", "scale", "zero"], ["q"]),
        helper.make_node("Clip", ["b", "low", "high"], ["c"]),
        helper.make_node("Clip", ["d", "low"], ["e"]),
    ]
    path = save_onnx(
        nodes,
        [("a", FLOAT, (2,)), ("b", FLOAT, (2,)), ("d", FLOAT, (2,))],
        [("q", UINT8, (2,)), ("c", FLOAT, (2,)), ("e", FLOAT, (2,))],
        [
            tensor("scale", np.float32(0.5)),
            tensor("zero", np.uint8(128)),
            tensor("low", np.float32(-1)),
            tensor("high", np.float32(6)),
        ],
    )
    assert import_model(path, isolated=isolated).ranges == {"a": (-64, 63.5), "b": (-1, 6)}


# --- the cache ---


def test_import_uses_cache_but_checks_external_files(
    save_onnx: Save, isolated: Isolated, cache: Cache, tmp_path: Path
) -> None:
    path = with_weight(save_onnx)
    (tmp_path / "w.bin").write_bytes(bytes(16))
    externalise(path, "w.bin")
    first = import_model(path, isolated=isolated, cache=cache)
    closed = Isolated(1)
    closed.close()
    assert import_model(path, isolated=closed, cache=cache) == replace(first, cached=True)
    (tmp_path / "w.bin").write_bytes(bytes(15))
    with pytest.raises(ImportFailed, match=r"w\.bin has 15 of 16 bytes"):
        import_model(path, isolated=closed, cache=cache)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ImportFailed, match="missing"):
        import_model(path, isolated=closed, cache=cache)


class Describes:
    """Fake isolated process that lists the files of a SavedModel."""

    def call(self, function: str, arguments: dict[str, Any], **_: Any) -> dict[str, Any]:
        folder = Path(arguments["path"]).parent
        external = sorted(str(file.relative_to(folder)) for file in (folder / "variables").iterdir())
        told = {"function": "f", "inputs": [], "outputs": [], "ranges": {}, "producer": {}}
        return {**told, "external": external}


def test_import_reads_changed_saved_model_again(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "variables").mkdir()
    (tmp_path / "saved_model.pb").write_bytes(b"a graph")
    (tmp_path / "variables" / "one").write_bytes(b"1")
    first = import_model(tmp_path, isolated=Describes(), cache=cache)  # type: ignore[arg-type]
    (tmp_path / "variables" / "one").rename(tmp_path / "variables" / "other")
    second = import_model(tmp_path, isolated=Describes(), cache=cache)  # type: ignore[arg-type]
    assert set(second.files) == {"saved_model.pb", "variables/other"}
    assert second.digest != first.digest


def test_node_label_uses_name_or_outputs() -> None:
    assert label_node(helper.make_node("Relu", ["x"], ["y"], name="act")) == "node 'act'"
    assert label_node(helper.make_node("Split", ["x"], ["a", "b"])) == "the node with outputs a, b"


@pytest.mark.parametrize("version", [-1, 1 << 31, (1 << 63) - 1])
def test_invalid_opset_raises_import_error(save_onnx: Save, isolated: Isolated, version: int) -> None:
    path = relu(save_onnx)
    model = onnx.load(path)
    model.opset_import[0].version = version
    onnx.save(model, path)
    with pytest.raises(ImportFailed, match="opset"):
        import_model(path, isolated=isolated)


@pytest.mark.parametrize("name", [b"Relu", b"act", b"net"])
def test_invalid_utf8_name_raises_import_error(save_onnx: Save, isolated: Isolated, name: bytes) -> None:
    path = relu(save_onnx)
    raw = path.read_bytes()
    assert name in raw
    path.write_bytes(raw.replace(name, b"\xff" * len(name)))
    with pytest.raises(ImportFailed, match="UTF-8"):
        import_model(path, isolated=isolated)


def test_many_unknown_operators_fail_quickly(save_onnx: Save, isolated: Isolated) -> None:
    nodes = [helper.make_node("Affine", ["x"], [f"y{number}"]) for number in range(2000)]
    nodes.append(helper.make_node("Nonesuch", ["x"], ["y"]))
    path = save_onnx(nodes, [("x", FLOAT, (2, 2))], [("y", FLOAT, (2, 2))])
    began = time.monotonic()
    with pytest.raises(ImportFailed, match="Nonesuch"):
        import_model(path, isolated=isolated)
    assert time.monotonic() - began < allowed_s(10)  # twelve milliseconds a node would be 24 s


def quantised(save: Save, scale: np.ndarray, zero: np.ndarray) -> Path:
    node = helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])
    return save([node], [("x", FLOAT, (4,))], [("y", UINT8, (4,))], [tensor("scale", scale), tensor("zero", zero)])


def test_mismatched_scale_and_zero_point_set_empty_range(save_onnx: Save, isolated: Isolated) -> None:
    scale, zero = np.ones((20_000, 1), np.float32), np.zeros((1, 20_000), np.uint8)
    model = import_model(quantised(save_onnx, scale, zero), isolated=isolated)  # 3 GB if they were multiplied out
    assert model.ranges == {}


def test_damaged_zero_point_raises_import_error(save_onnx: Save, isolated: Isolated) -> None:
    path = quantised(save_onnx, np.ones(1, np.float32), np.zeros(1, np.uint8))
    assert import_model(path, isolated=isolated).ranges == {"x": (0.0, 255.0)}
    model = onnx.load(path)
    model.graph.initializer[1].dims[:] = [7]
    onnx.save(model, path)
    with pytest.raises(ImportFailed, match=r"tensor 'zero' \(uint8 \[7\]\) has 1 of 7 bytes"):
        import_model(path, isolated=isolated)


def test_huge_rank_uses_bounded_memory(save_onnx: Save, tmp_path: Path) -> None:
    node = helper.make_node("Expand", ["x", "shape"], ["y"])
    shape = (1 << 31) - 1
    path = save_onnx([node], [("x", FLOAT, (1,)), ("shape", INT64, (shape,))], [("y", FLOAT, (3,))])
    code = (
        "import resource, sys\nfrom hil.controller.models.importers.onnx import describe"
        "\ndescribe(sys.argv[1], '', {});"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1500


@pytest.mark.parametrize("placeholder", ["?", "", "-1", "None", "*"])
def test_placeholder_dimensions_get_separate_names(save_onnx: Save, isolated: Isolated, placeholder: str) -> None:
    path = relu(save_onnx, ("N", placeholder, placeholder))
    assert import_model(path, isolated=isolated).inputs == (TensorSpec("x", "float32", ("N", "x.dim1", "x.dim2")),)
    fixed = import_model(path, dims={"x.dim2": 4}, isolated=isolated)
    assert fixed.inputs == (TensorSpec("x", "float32", ("N", "x.dim1", 4)),)
