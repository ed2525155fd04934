"""Single checks of the contract, with small compilers and runtimes in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated, IsolatedFailure
from hil.controller.workloads.plugin_check import board_imports, compilers, runtimes, small_models
from hil.core.files import digest_file
from hil.core.results import Artifact
from hil.core.tensors import make_spec
from hil.errors import CompileFailed

FLAGS = ("--lanes=16",)


def compile_by(make_key: Callable[[str, Sequence[str]], str]) -> Callable[..., Artifact]:
    """Return a compiler with the flags --lanes=N. The program is the flags."""

    def compile_model(model: Any, *, cache: Cache, flags: Sequence[str], recompute: bool, **_: Any) -> Artifact:
        if not all(flag.startswith("--lanes=") for flag in flags):
            raise CompileFailed(f"unknown flag in {flags}")
        lanes = [flag for flag in flags if flag != "--lanes=1"]  # the default
        key = cache.key("acme", parts=make_key(model.name, lanes))

        def make(folder: Path) -> None:
            (folder / "program").write_text(f"{model.name} {lanes}")

        folder, cached = cache.get_or_make(key, {}, make, recompute)
        file = folder / "program"
        return Artifact(
            "acme", "program", {"program": file}, {"program": digest_file(file)}, "", "acme 1", cached=cached
        )

    return compile_model


def load_as(monkeypatch: pytest.MonkeyPatch, module: Any, thing: object) -> None:
    monkeypatch.setattr(module, "find_point", lambda *_: SimpleNamespace(load=lambda: thing))


def check_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: object, *others: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    load_as(monkeypatch, compilers, function)
    with Isolated(1) as isolated:
        compiler = compilers._CheckedCompiler("acme", "hil-acme", FLAGS, tmp_path, isolated)
        model: Any = SimpleNamespace(name="m")
        first = compiler.compile(model)
        found = [*compiler.check_cache(model, first), *compiler.check_flags(model, first, others)]
    return [f"{one.rule}: {one.found}" for one in found], compiler.skipped


def test_cache_key_without_setting_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    without_lanes = compile_by(lambda model, lanes: model)
    found, skipped = check_keys(tmp_path, monkeypatch, without_lanes, ["--lanes=16", "--lanes=1"], ["--lanes=4"])
    assert found[-1] == "cache-key: with the flags --lanes=4, the key is the same"
    assert not skipped


def test_cache_key_with_setting_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = compile_by(lambda model, lanes: f"{model} {lanes}")
    assert check_keys(tmp_path, monkeypatch, right, ["--lanes=4"]) == ([], {})


@pytest.mark.parametrize("others", [(), (["--lanes=16", "--lanes=1"],), (["--wide"],)])
def test_cache_key_without_second_setting_is_skipped(others: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found, skipped = check_keys(tmp_path, monkeypatch, compile_by(lambda model, lanes: model), *others)
    assert found == []
    assert "no second setting known: --hil-check-flag=1 is refused" in skipped["cache-key"]


def test_equal_keys_of_models_are_found():
    keys = {"a": {"library", "a"}}
    assert compilers.find_same_key({"a"}, keys) == "a"
    assert compilers.find_same_key({"library", "b"}, keys) == ""
    assert compilers.find_same_key(set(), keys) == ""


def wrap(cause: Exception) -> Exception:
    try:
        try:
            raise cause
        except type(cause) as error:
            raise CompileFailed(str(error)) from None
    except CompileFailed as error:
        return error


def test_unexpected_error_behind_refusal_is_found():
    assert compilers.find_mistake(wrap(TypeError("no len()"))) == "TypeError: no len()"
    assert compilers.find_mistake(wrap(IsolatedFailure("KeyError: 'x'"))) == "KeyError: 'x'"
    # Errors that a compiler converts: a missing operator in a table, a library's error.
    assert compilers.find_mistake(wrap(KeyError("Cos"))) == ""
    assert compilers.find_mistake(wrap(IsolatedFailure("RuntimeError: no Cos"))) == ""
    assert compilers.find_mistake(CompileFailed("no Cos")) == ""


def test_import_of_module_that_boards_lack_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "acme_kernels.py").write_text("import google.protobuf, grpc, json, ml_dtypes, numpy\n")
    optional = "try:\n    import onnx\nexcept ImportError:\n    onnx = None\n"
    (tmp_path / "acme_right.py").write_text(f"import acme_kernels\n{optional}class Runtime: pass\n")
    (tmp_path / "acme_wrong.py").write_text("import onnx\nclass Runtime: pass\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    assert board_imports.check_board_import("acme_right:Runtime", "hil-acme") == []
    found = board_imports.check_board_import("acme_wrong:Runtime", "hil-acme")
    assert found == [["board-import", "ModuleNotFoundError: boards have no module onnx"]]


def test_board_has_requirements_of_package_without_those_of_hil(monkeypatch: pytest.MonkeyPatch):
    needed = {"hil-acme": ["hil", "Acme_Driver>=1", "rich; extra == 'tui'"], "acme-driver": ["acme.bits"]}
    monkeypatch.setattr(board_imports.metadata, "requires", lambda name: needed.get(name, []))
    monkeypatch.setattr(board_imports, "list_agent_packages", lambda runtimes: {"numpy"})
    assert board_imports.list_board_distributions("hil_acme") == {
        "hil",
        "hil-acme",
        "acme-driver",
        "acme-bits",
        "numpy",
    }


class _LeakyRuntime:
    """Runtime that keeps the files of its programs open."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._files: list[int] = []

    def __del__(self) -> None:
        for file in self._files:
            os.close(file)

    def prepare(self, device: str) -> None:
        pass

    def load(self, folder: Path, main: str, device: str, function: str) -> Any:
        self._files.append(os.open(folder / main, os.O_RDONLY))
        spec = make_spec("x", np.zeros(1, np.float32))
        given: list[Any] = []
        return SimpleNamespace(
            inputs=(spec,), outputs=(spec,), function="", bind=given.extend, run=lambda: None, fetch=lambda: given
        )


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_files_that_runtime_keeps_open_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "main").touch()
    load_as(monkeypatch, runtimes, _LeakyRuntime)
    program = {"model": "float32", "main": "main", "function": "", "files": {"main": str(tmp_path / "main")}}
    assert runtimes.check_leaks("acme", "hil-acme", program) == [["leak", "8 more open files after 8 loads"]]


def test_wrong_values_show_worst_element():
    right = np.arange(8, dtype=np.float32).reshape(2, 4)
    array = right.copy()
    assert small_models.find_wrong_values(array, right) == ""
    array[0, 0], array[1, 2] = 0.25, 6.5
    assert small_models.find_wrong_values(array, right) == (
        "wrong at [1, 2]: 6.5, expected 6.0, difference 0.5 (2 of 8 elements are wrong)"
    )
    array[1, 3] = np.nan
    assert "wrong at [1, 3]: nan, expected 7.0, difference nan" in small_models.find_wrong_values(array, right)
    scalar = small_models.find_wrong_values(np.array(True), np.array(False))
    assert scalar == "wrong: True, expected False, difference 1 (1 of 1 elements are wrong)"
    assert small_models.find_wrong_values(np.zeros((0, 4)), np.zeros((0, 4))) == ""
