"""Parsing backend names."""

from __future__ import annotations

import pytest

from hil.errors import UsageError
from hil.testing.traces.backends import (
    count_option,
    find_relation,
    parse_backend,
    parse_reference,
    parse_targets,
    refuse_second,
)


def test_parse_targets_gives_duplicate_backends_separate_ids():
    ids = [backend.id for backend in parse_targets("iree_vmvx,tf, iree_vmvx,board:sim")]
    assert ids == ["iree_vmvx_0", "tf", "iree_vmvx_1", "board_sim"]
    assert parse_reference("iree_vmvx").id == "iree_vmvx_ref"


def test_local_backends_run_on_simulated_boards():
    cpu, interpreter, gpu, tflite = parse_targets("iree_llvmcpu,iree_vmvx,iree_cuda,tflite")
    assert cpu.choice.config.compile_flags["iree"] != interpreter.choice.config.compile_flags["iree"]
    assert gpu.choice.config.devices["iree"] == "cuda"
    assert (tflite.runtime, tflite.hw_type, cpu.runtime) == ("tflite", "sim", "iree")
    assert not any(backend.is_real for backend in (cpu, interpreter, gpu, tflite))


def test_parse_targets_accepts_board_files_and_addresses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arm.toml").write_text('[board]\nhw_type = "arm"\n[connection]\naddress = "root@10.0.0.7"\n')
    file, address, other = parse_targets("board:arm.toml,board:root@10.0.0.7:2222,board:root@10.0.0.7:2222:tflite")
    assert (file.hw_type, file.runtime, file.is_real) == ("arm", "iree", True)
    assert address.board == "root@10.0.0.7:2222" == other.board
    assert (address.runtime, other.runtime) == ("iree", "tflite")
    assert other.id == "board_root_10.0.0.7_2222_tflite"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("iree_llvmjit", "unknown backend 'iree_llvmjit'"),
        ("onnxruntime", "unknown backend 'onnxruntime'"),
        ("board:", "unknown backend 'board:'"),
        ("board:rpi55", "unknown board"),
        ("board:no.toml", "board config not found"),
        ("board:plain.toml:tflite", "does not support runtime 'tflite'"),
    ],
)
def test_parse_backend_rejects_unknown_names(name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.toml").write_text('[devices]\niree = "local-task"\n[simulator]\n')
    with pytest.raises(UsageError, match=said):
        parse_backend(name)


def test_parse_backend_accepts_references_for_model_files():
    assert parse_backend("onnxruntime", ["onnxruntime"]).choice is None
    with pytest.raises(UsageError, match="--target_backends is empty"):
        parse_targets(" ,")


def test_target_option_given_twice_raises_usage_error():
    words = ["--target_backends", "tf", "-k", "x", "--target_backends=tflite", "--", "--target_backends"]
    assert count_option(words, "--target_backends") == 2
    refuse_second("--target_backends", 1)
    with pytest.raises(UsageError, match="--target_backends is specified 2 times"):
        refuse_second("--target_backends", 2)


@pytest.mark.parametrize(
    ("target", "reference", "relation"),
    [
        ("iree_llvmcpu", "tf", "independent"),
        ("iree_llvmcpu", "iree_vmvx", "self-check"),
        ("iree_vmvx", "iree-llvm-cpu", "self-check"),
        ("iree_llvmcpu", "onnxruntime", "independent"),
        ("iree_llvmcpu", "tflite", "independent"),
        ("tflite", "tflite", "same library"),
    ],
)
def test_relation_between_backends_follows_runtimes(target, reference, relation):
    names = ("onnxruntime", "iree-llvm-cpu")
    found = find_relation(parse_backend(target, names), parse_reference(reference, names))
    assert found.value == relation
