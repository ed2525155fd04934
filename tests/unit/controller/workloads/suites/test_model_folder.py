"""Find and name models in a directory."""

from __future__ import annotations

import numpy as np
import pytest

from hil.controller.workloads.suites.cases.model_scan import scan_models
from hil.errors import UsageError


@pytest.fixture
def folder(tmp_path):
    def make(*files: str):
        for name in files:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
        return tmp_path

    return make


def names(found):
    return [model.name for model in found]


def test_look_finds_models_at_any_depth(folder):
    place = folder("b.onnx", "a.mlir", "deep/er/c.vmfb", "deep/d.ONNX")
    assert names(scan_models(place).models) == ["a", "b", "d", "c"]


def test_look_finds_models_of_other_frameworks(folder):
    place = folder("a.tflite", "b.pte", "c.bpte", "d.pt2", "e.keras")
    assert names(scan_models(place).models) == ["a", "b", "c", "d", "e"]


def test_saved_model_takes_name_of_directory(folder):
    place = folder("net/saved_model.pb", "net/fingerprint.pb", "net/keras_metadata.pb", "graph.pb")
    (found,) = scan_models(place).models
    assert (found.name, found.path) == ("net", place / "net" / "saved_model.pb")
    np.savez(place / "net.inputs.npz", x=np.zeros(3, np.float32))
    assert list(found.given()) == ["x"]


def test_graph_needs_config_or_explicit_path(folder):
    place = folder("a.pbtxt", "a.config.pbtxt", "b.pb", "b.config.pb", "labels.pbtxt", "c.pb", "d.so")
    assert names(scan_models(place).models) == ["a", "b"]
    for name in ("c.pb", "labels.pbtxt", "d.so"):
        assert names(scan_models(place / name).models) == [name.split(".")[0]]
    with pytest.raises(UsageError, match=r"unsupported model format: a\.config\.pbtxt"):
        scan_models(place / "a.config.pbtxt")


def test_look_rejects_auxiliary_saved_model_file(folder):
    with pytest.raises(UsageError, match=r"unsupported model format: fingerprint\.pb"):
        scan_models(folder("net/fingerprint.pb") / "net" / "fingerprint.pb")


def test_look_skips_hidden_and_other_files(folder):
    place = folder(".git/a.onnx", ".b.onnx", "expected.toml", "c.calibration.npz", "c.onnx.data", "README.md", "c.onnx")
    assert names(scan_models(place).models) == ["c"]


def test_look_skips_stored_runs(folder):
    place = folder("a.onnx", "run/suite.json", "run/cases/x/a.onnx", "old/run.json", "old/a.onnx")
    assert names(scan_models(place).models) == ["a"]


def test_models_with_same_name_get_path_prefix(folder):
    place = folder("x/net.onnx", "y/net.onnx", "y/other.onnx")
    assert names(scan_models(place).models) == ["x.net", "y.net", "other"]


def test_models_with_same_path_get_suffix(folder):
    place = folder("net.onnx", "net.mlir")
    assert names(scan_models(place).models) == ["net.mlir", "net.onnx"]


def test_model_names_are_valid_unique_ids(folder):
    place = folder("a b.onnx", "a_b.onnx", "größe.onnx")
    found = names(scan_models(place).models)
    assert found == ["a_b.onnx", "a_b.onnx-2", "gr__e"]


def test_single_file_gives_single_model(folder):
    place = folder("a.onnx", "b.onnx")
    assert names(scan_models(place / "b.onnx").models) == ["b"]


def test_look_rejects_file_without_model(folder):
    with pytest.raises(UsageError, match="unsupported model format: notes"):
        scan_models(folder("notes.txt") / "notes.txt")


def test_empty_directory_has_empty_model_list(folder):
    assert scan_models(folder("README.md")).models == []


def test_tensor_files_give_inputs_and_expected_outputs(folder):
    place = folder("net.onnx", "bare.onnx")
    np.savez(place / "net.inputs.npz", x=np.arange(3))
    np.savez(place / "net.expected.npz", y=np.arange(4))
    bare, net = scan_models(place).models
    assert net.given()["x"].tolist() == [0, 1, 2]
    assert net.expected()["y"].tolist() == [0, 1, 2, 3]
    assert bare.given() == {} and bare.expected() == {}


def test_look_finds_bundles_and_golden_directories(folder):
    place = folder(
        "a.hilb", "b.bpte", "set/golden.json", "set/program/main.vmfb", "set/f-0/0-x/input_0.npy", "golden.json"
    )
    found = scan_models(place).models
    assert names(found) == ["a", "b", "set"]
    assert all(model.own_cases is not None and not model.is_case for model in found)
    assert found[2].path == place / "set" / "golden.json" and len(found[2].beside) == 3 + 2
    np.savez(place / "b.inputs.npz", x=np.zeros(3, np.float32))
    assert scan_models(place).models[1].is_case


def test_data_sets_belong_to_model_in_same_directory(folder):
    place = folder("net/a.onnx", *(f"net/test_data_set_{number}/input_0.pb" for number in (10, 9)))
    (model,) = scan_models(place).models
    assert [one.name for one in model.data_sets] == ["test_data_set_9", "test_data_set_10"]
    assert scan_models(place).left_out == []
    folder("net/b.onnx", "net/test_data_set_x/input_0.pb")
    found = scan_models(place)
    assert not any(model.data_sets for model in found.models)
    assert ["test_data_set_x" in line or "2 test_data_set_N" in line for line in found.left_out] == [True, True]
    folder("net/model.onnx")
    assert [bool(model.data_sets) for model in scan_models(place).models] == [False, False, True]


def test_flagfiles_refer_to_program_in_other_directory(folder):
    place = folder("run/net.vmfb", "flags/x", "alone.vmfb")
    for number in range(11):
        flags = "--module=../run/net.vmfb\n--expected_output=1xf32=1\n"
        (place / "flags" / f"flagfile_call_{number}").write_text(flags)
    (place / "flags" / "flagfile").write_text(flags)
    (place / "flags" / "trace.json").touch()
    for number in range(12):
        (place / "flags" / f"call_{number}").mkdir()
    alone, net = scan_models(place).models
    assert (net.name, alone.name, alone.own_cases) == ("net", "alone", None)
    calls = [f"call_{number}" for number in range(11)]
    assert [one.name for one in net.own_cases(None)] == [f"flags.{name}" for name in calls]
    assert scan_models(place).left_out == [f"{place / 'flags'}: 1 of 12 calls have no flag file"]
    (found,) = scan_models(place / "flags").models
    assert (found.name, found.path) == ("net", place / "flags" / "flagfile_call_0")
    assert [one.name for one in found.own_cases(None)] == calls
    (one,) = scan_models(place / "flags" / "flagfile_call_3").models
    assert [one.name for one in one.own_cases(None)] == ["call_3"]
