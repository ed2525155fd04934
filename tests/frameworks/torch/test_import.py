"""Import of `.pt2` files, and rejection of unsafe files before torch reads them."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.torch_modules import Counting, Keeping, Nested, Net, Recurrent, save, save_net

from hil.controller.models.importers import import_model
from hil.controller.models.importers.exported.pt2 import describe
from hil.errors import ImportFailed, UsageError

MODEL = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"


class Touch:
    """Create a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return save_net(tmp_path / "net.pt2")


def rewritten(path: Path, change: Callable[[dict[str, bytes]], None], compression: int = zipfile.ZIP_STORED) -> Path:
    """Rewrite an archive with changed records."""
    with zipfile.ZipFile(path) as archive:
        entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(entries)
    out = path.with_name("changed.pt2")
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(f"net/{name}", data)
    return out


def edited(path: Path, edit: Callable[[Any], None], record: str = MODEL) -> Path:
    def change(entries: dict[str, bytes]) -> None:
        document = json.loads(entries[record])
        edit(document)
        entries[record] = json.dumps(document).encode()

    return rewritten(path, change)


def test_describe_flattens_structures_with_readable_names(tmp_path):
    batch = torch.export.Dim("batch", min=2, max=9)
    path = save(
        tmp_path / "nested.pt2",
        Nested(),
        torch.randn(3, 4),
        {"a": torch.randn(3), "b": [torch.randn(5)]},
        scale=3.0,
        dynamic={"x": {0: batch}, "extra": {"a": {0: batch}, "b": [None]}, "scale": None},
    )
    found = describe(str(path), "", {})
    assert found["inputs"] == [
        ["x", "float32", ["x.dim0", 4]],
        ["extra_a", "float32", ["x.dim0"]],
        ["extra_b_0", "float32", [5]],
    ]
    assert found["outputs"] == [
        ["y", "float32", ["x.dim0", 3]],
        ["rest_0", "float32", ["x.dim0"]],
        ["rest_2", "float32", [5]],
    ]
    assert found["producer"]["constants"] == {"scale": "3.0"}
    assert found["producer"]["constant_outputs"] == {"rest_1": "7"}
    assert describe(str(path), "", {"x.dim0": 4})["outputs"][1] == ["rest_0", "float32", [4]]
    with pytest.raises(UsageError, match=r"exported for x\.dim0 of 2 to 9, not 10"):
        describe(str(path), "", {"x.dim0": 10})
    with pytest.raises(UsageError, match="no dimension 'batch'"):
        describe(str(path), "", {"batch": 4})


def test_describe_gives_outputs_names_distinct_from_inputs(tmp_path):
    state = (torch.zeros(1, 2, 5), torch.zeros(1, 2, 5))
    found = describe(str(save(tmp_path / "r.pt2", Recurrent(), torch.randn(3, 2, 4), state)), "", {})
    assert [name for name, *_ in found["inputs"]] == ["x", "state_0", "state_1"]
    assert [name for name, *_ in found["outputs"]] == ["y", "state_0_out", "state_1_out"]


def test_describe_limits_random_indices_to_valid_range(tmp_path):
    class Embed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(20, 4)

        def forward(self, words, places, counts):
            return self.table(words).gather(1, places) + counts

    inputs = [torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, 4, dtype=torch.int64), torch.zeros(1).long()]
    found = describe(str(save(tmp_path / "e.pt2", Embed(), *inputs)), "", {})
    assert found["ranges"] == {"words": (0, 19), "places": (0, 4)}


def test_import_rejects_invalid_archives(tmp_path, net):
    data = net.read_bytes()
    for name, content in (("text", b"hello"), ("cut", data[: len(data) // 2]), ("zip", zip_of({"a/b": b"c"}))):
        path = tmp_path / f"{name}.pt2"
        path.write_bytes(content)
        with pytest.raises(ImportFailed, match=f"{name}.pt2"):
            import_model(path)
    old = tmp_path / "old.pt2"
    old.write_bytes(zip_of({"serialized_exported_program.json": b"{}", "version": b"8.2"}))
    with pytest.raises(ImportFailed, match=r"torch 2\.7 or older"):
        import_model(old)


def test_describe_rejects_or_ignores_damaged_bytes(net, tmp_path):
    data = net.read_bytes()
    whole = describe(str(net), "", {})
    for at in range(0, len(data), len(data) // 40):
        damaged = tmp_path / "damaged.pt2"
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            found = describe(str(damaged), "", {})
        except ImportFailed:
            continue
        assert [found["inputs"], found["outputs"]] == [whole["inputs"], whole["outputs"]], at


@pytest.mark.parametrize("where", ["inputs", "weights", "constants"])
def test_describe_never_executes_pickles(net, tmp_path, where):
    made = tmp_path / "executed"
    buffer = io.BytesIO()
    torch.save(Touch(made), buffer)

    def change(entries: dict[str, bytes]) -> None:
        if where == "inputs":
            entries["data/sample_inputs/model.pt"] = buffer.getvalue()
        elif where == "weights":
            config = json.loads(entries[WEIGHTS])
            payload = next(iter(config["config"].values()))
            payload["use_pickle"] = True
            entries[f"data/weights/{payload['path_name']}"] = buffer.getvalue()
            entries[WEIGHTS] = json.dumps(config).encode()
        else:
            config = {"config": {"c": {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True}}}
            config["config"]["c"]["tensor_meta"] = None
            entries["data/constants/opaque_obj_0"] = pickle.dumps(Touch(made))
            entries["data/constants/model_constants_config.json"] = json.dumps(config).encode()

    changed = rewritten(net, change)
    with pytest.raises(ImportFailed):
        describe(str(changed), "", {})
    assert not made.exists()


def test_describe_refuses_to_evaluate_expressions_and_operators(net, tmp_path):
    made = tmp_path / "executed"
    code = f"__import__('pathlib').Path({str(made)!r}).touch()"

    def size(program: Any) -> None:
        program["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0] = {
            "as_expr": {"expr_str": code, "hint": {"as_int": 2}}
        }

    def operator(program: Any) -> None:
        node = program["graph_module"]["graph"]["nodes"][-1]
        node["target"] = "torch.os.system"

    def call(program: Any) -> None:
        program["graph_module"]["graph"]["nodes"][-1]["target"] = "_operator.call"

    def library(program: Any) -> None:
        program["graph_module"]["graph"]["nodes"][-1]["target"] = "torch.ops.load_library"

    def reads_files(program: Any) -> None:
        program["graph_module"]["graph"]["nodes"][-1]["target"] = "torch.ops.aten.from_file.default"

    def name(program: Any) -> None:
        text = json.dumps(program).replace('{"name": "x"}', json.dumps({"name": f"x): {code}\n    pass #"}))
        program.clear()
        program.update(json.loads(text))

    def container(program: Any) -> None:
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        context = {"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []}
        tree = {"type": "collections.defaultdict", "context": context, "children_spec": []}
        signature["in_spec"] = json.dumps([1, tree])

    for edit in (size, operator, call, library, reads_files, name, container):
        with pytest.raises(ImportFailed, match="that hil does not allow"):
            describe(str(edited(net, edit)), "", {})
    assert not made.exists()


def test_load_program_ignores_guards_code(net, tmp_path):
    from hil.controller.models.importers.exported.pt2_archive import load_program

    made = tmp_path / "executed"
    changed = edited(net, lambda program: program.update(guards_code=[f"open({str(made)!r}, 'w')"]))
    load_program(str(changed)).module()(torch.zeros(2, 3, 8, 8))
    assert not made.exists()


def test_describe_rejects_compiled_code_bombs_and_huge_shapes(net):
    with pytest.raises(ImportFailed, match="unsupported compiled code or pickle"):
        describe(str(rewritten(net, lambda e: e.update({"data/aotinductor/model/a.so": b"x"}))), "", {})
    with pytest.raises(ImportFailed, match="compressed or repeated"):
        describe(str(rewritten(net, lambda e: e.update({"extra/a": bytes(1 << 20)}), zipfile.ZIP_DEFLATED)), "", {})

    def absurd(config: Any) -> None:
        payload = config["config"]["conv.weight"]
        payload["path_name"] = "empty"
        payload["tensor_meta"]["sizes"] = [{"as_int": 1 << 40}]

    changed = rewritten(edited(net, absurd, WEIGHTS), lambda e: e.update({"data/weights/empty": b""}))
    with pytest.raises(ImportFailed, match=r"conv\.weight.* but no data"):
        describe(str(changed), "", {})


def test_describe_lists_changed_state_as_outputs(tmp_path):
    found = describe(str(save(tmp_path / "c.pt2", Counting(), torch.zeros(3))), "", {})
    assert found["outputs"] == [["output", "float32", [3]], ["seen_out", "float32", [3]]]
    found = describe(str(save(tmp_path / "k.pt2", Keeping(), torch.zeros(3), torch.zeros(3))), "", {})
    assert [name for name, *_ in found["inputs"]] == ["x", "kept"]
    assert [name for name, *_ in found["outputs"]] == ["inner.total_out", "kept_out"]


def test_describe_accepts_training_module(tmp_path):
    program = torch.export.export(Net().train(), (torch.randn(2, 3, 8, 8),))
    torch.export.save(program, tmp_path / "t.pt2")
    assert describe(str(tmp_path / "t.pt2"), "", {})["outputs"] == [
        ["output", "float32", [2, 2]],
        ["bn.num_batches_tracked_out", "int64", []],
        ["bn.running_mean_out", "float32", [4]],
        ["bn.running_var_out", "float32", [4]],
    ]


def zip_of(entries: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return buffer.getvalue()


class Drawing(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        noise = torch.bernoulli(torch.sigmoid(x))
        kept = torch.nn.functional.dropout(x, 0.5, training=False) + torch.nn.functional.dropout(x, 0.0, training=True)
        return noise + kept + torch.nn.functional.dropout(x, 0.5, training=True)


def test_import_names_random_nodes(tmp_path: Path) -> None:
    model = import_model(save(tmp_path / "drawing.pt2", Drawing(), torch.randn(4)))
    assert model.random == ("bernoulli (bernoulli)", "dropout_2 (dropout)")
    assert model.random_outputs == ("output",)
