"""Import compiled ExecuTorch and tfcompile programs without their compilers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.models import importers
from hil.controller.models.importers import import_model
from hil.controller.storage.cache import Cache
from hil.core.tensors import TensorSpec
from hil.errors import ImportFailed, UsageError
from hil.formats.xla_program import VALUES, Argument, LibrarySignature, write_signature

FILES = Path(__file__).parents[3] / "executorch_files"


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("linear.pte", ["input0: 2x4 float32"], ["output0: 2x3 float32", "output1: 2x4 float32"]),
        ("numbers.pte", ["input0: 2x4 float32"], ["output0: 2x4 float32"]),
        ("mixed.bpte", ["input0: 2x4 float32"], ["output0: 2x3 float32", "output1: 2x4 bool", "output2: 2x4 int64"]),
    ],
)
def test_import_reads_signature_of_pte(name: str, inputs: list[str], outputs: list[str]):
    model = import_model(FILES / name)
    assert (model.format, model.function) == ("pte", "forward")
    assert [str(spec) for spec in model.inputs] == inputs
    assert [str(spec) for spec in model.outputs] == outputs
    assert model.producer["bundled"] is name.endswith(".bpte")


def test_import_detects_pte_by_first_bytes(tmp_path: Path):
    path = tmp_path / "program.bin"
    path.write_bytes((FILES / "linear.pte").read_bytes())
    assert import_model(path).format == "pte"


def test_import_fixes_open_dimensions(tmp_path: Path):
    model = import_model(FILES / "dynamic.pte", dims={"input0.dim0": 3, "input0.dim1": 4})
    assert model.inputs[0].shape == (3, 4)
    assert model.producer["most"] == {"input0": [8, 4]}
    with pytest.raises(UsageError, match="no dimension 'n'") as error:
        import_model(FILES / "dynamic.pte", dims={"n": 3})
    assert error.value.hint == "symbolic dimensions: input0.dim0, input0.dim1"


@pytest.mark.ci
def test_damaged_pte_raises_import_error(tmp_path: Path):
    whole = (FILES / "linear.pte").read_bytes()
    path = tmp_path / "broken.pte"
    for content in (whole[:100], b"\0" * 64, whole[:8] + b"\xff" * 200, b"ET12" * 4):
        path.write_bytes(content)
        with pytest.raises(ImportFailed, match=r"broken\.pte"):
            import_model(path)


def test_missing_method_raises_usage_error():
    with pytest.raises(UsageError, match="no method 'backward'") as error:
        import_model(FILES / "linear.pte", function="backward")
    assert error.value.hint == "choose one with --function: forward"


@pytest.mark.ci
def test_import_includes_ptd_file(tmp_path: Path):
    model = import_model(FILES / "outside.pte")
    assert sorted(model.files) == ["outside.ptd", "outside.pte"]
    alone = tmp_path / "alone.pte"
    alone.write_bytes((FILES / "outside.pte").read_bytes())
    cache = Cache(tmp_path / "cache")
    with pytest.raises(ImportFailed, match=r"next to the program, with the name alone\.ptd"):
        import_model(alone, cache=cache)
    (tmp_path / "alone.ptd").write_bytes((FILES / "outside.ptd").read_bytes())
    assert sorted(import_model(alone, cache=cache).files) == ["alone.ptd", "alone.pte"]
    assert import_model(alone, cache=cache).cached


def test_import_ignores_invalid_ptd_files(tmp_path: Path):
    program = tmp_path / "outside.pte"
    program.write_bytes((FILES / "outside.pte").read_bytes())
    (tmp_path / "tensors.ptd").write_bytes((FILES / "outside.ptd").read_bytes())
    (tmp_path / "folder.ptd").mkdir()
    (tmp_path / "nowhere.ptd").symlink_to("nothing")
    assert sorted(import_model(program).files) == ["outside.pte", "tensors.ptd"]


def test_import_digests_each_file_once(monkeypatch):
    digest_file, read = importers.digest_file, []
    monkeypatch.setattr(importers, "digest_file", lambda file: read.append(file.name) or digest_file(file))
    import_model(FILES / "outside.pte")
    assert read.count("outside.ptd") == read.count("outside.pte") == 1


LIBRARY = LibrarySignature(
    "step",
    (
        Argument(TensorSpec("x", "float32", (3,))),
        Argument(TensorSpec("fc1/kernel", "float32", (2,)), variable=True, assigned=True),
    ),
    (TensorSpec("loss", "float32", ()),),
)


@pytest.mark.ci
def test_import_reads_tfcompile_library(tmp_path: Path):
    path, cache = tmp_path / "step.so", Cache(tmp_path / "cache")
    path.write_bytes(b"\x7fELF" + bytes(60) + write_signature(LIBRARY).encode() + bytes(60))
    model = import_model(path, cache=cache)
    assert (model.format, model.function) == ("so", "step")
    assert [str(spec) for spec in model.inputs] == ["x: 3 float32", "fc1/kernel: 2 float32"]
    assert [spec.name for spec in model.outputs] == ["loss", "variable fc1/kernel"]
    # With initial values beside it, the program starts from those.
    (tmp_path / VALUES).write_bytes(bytes(8))
    model = import_model(path, cache=cache)
    assert [spec.name for spec in model.inputs] == ["x"] and set(model.files) == {"step.so", VALUES}
    with pytest.raises(UsageError, match="has no function 'other'"):
        import_model(path, function="other", cache=cache)
    # Values named after the program take precedence over the shared file.
    (tmp_path / "step.variables.bin").write_bytes(bytes(8))
    (tmp_path / VALUES).write_bytes(bytes(7))
    assert set(import_model(path, cache=cache).files) == {"step.so", "step.variables.bin"}
    (tmp_path / "step.variables.bin").unlink()
    with pytest.raises(ImportFailed, match="has 7 bytes, but the program's variables need 8"):
        import_model(path, cache=cache)


@pytest.mark.ci
@pytest.mark.parametrize("data", [b"\x7fELF", b'{"abi": 1, "function": ', b'{"abi": 99, "function": ""}\0'])
def test_other_library_raises_import_error(tmp_path: Path, data: bytes):
    (tmp_path / "libc.so").write_bytes(data)
    with pytest.raises(ImportFailed, match=r"libc\.so: "):
        import_model(tmp_path / "libc.so")
