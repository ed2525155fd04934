"""Bundle formats round-trip and reject unsupported contents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.bundle_files import bundle, case, program
from support.models import save_model

from hil.bundles import Bundle, MethodTestCase, MethodTestSuite, Signature
from hil.controller.backends.references.noise import encode_noise
from hil.controller.models.inputs import make_random_tensor
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.bundles.flagfile import _make_tolerance_flags
from hil.controller.workloads.bundles.formats import Format, load_formats, read_format, write_format
from hil.core.results import Artifact
from hil.core.tensors import DTYPES, TensorSpec
from hil.errors import UsageError


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> Iterator[RunContext]:
    with Isolated(1) as isolated:
        yield RunContext(Cache(tmp_path_factory.mktemp("cache")), isolated)


@pytest.fixture
def golden(tmp_path, context) -> Path:
    """A bundle of two cases as a golden folder."""
    write_format("golden", bundle(tmp_path), tmp_path / "golden", context=context)
    return tmp_path / "golden"


def read(folder: Path, context: RunContext, form: str = "golden") -> Bundle:
    return read_format(form, folder, context=context)


def test_old_package_format_receives_context_as_shop(tmp_path, context, monkeypatch):
    given: list[object] = []
    made = bundle(tmp_path)
    old = Format(
        lambda path, *, shop: given.append(shop) or made, lambda bundle, path, *, shop: given.append(shop), True, ""
    )
    monkeypatch.setattr("hil.controller.workloads.bundles.formats.load_formats", lambda: {"old": old})
    read(tmp_path, context, "old")
    write_format("old", made, tmp_path / "out", context=context)
    assert given == [context, context]


def test_golden_format_round_trips_every_dtype(tmp_path, context):
    specs = [TensorSpec(dtype, dtype, shape) for dtype in DTYPES for shape in [(2, 3)]]
    specs += [TensorSpec("scalar", "float32", ()), TensorSpec("empty", "bfloat16", (0, 4))]
    values = [make_random_tensor(spec, spec.shape, seed=1) for spec in specs]
    made = Bundle.create(
        program(tmp_path, specs, specs),
        [MethodTestSuite("f", [MethodTestCase(values, values, rtol=0.5, name="../../a case", source="x 1")])],
        made={"model": {"name": "m"}},
    )
    write_format("golden", made, tmp_path / "golden", context=context)
    assert read(tmp_path / "golden", context).digest == made.digest
    assert {path.name for path in tmp_path.iterdir()} == {"golden", "main.bin", "weights"}


def noisy(folder: Path) -> Bundle:
    """A bundle of a case whose output is known to move by rounding alone."""
    first = case()
    return bundle(folder, replace(first, noise={"y": encode_noise(np.full(3, 2e-3))}))


def test_golden_format_preserves_noise(tmp_path, context):
    made = noisy(tmp_path)
    write_format("golden", made, tmp_path / "golden", context=context)
    again = read(tmp_path / "golden", context)
    assert again.digest == made.digest
    assert {float(one) for one in again.methods[0].cases[0].noise["y"].ravel()} == {2.0**-8}
    index = tmp_path / "golden" / "golden.json"
    document = json.loads(index.read_text())
    assert document["methods"][0]["cases"][0]["noise"] == ["y"]
    document["methods"][0]["cases"][0]["noise"] = {"y": [0.002, 0.001, 0.002]}
    index.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="an earlier version of hil measured the noise") as caught:
        read(tmp_path / "golden", context)
    assert caught.value.hint == "create a new bundle"


def test_flagfile_tolerance_includes_noise(tmp_path):
    method = noisy(tmp_path).methods[0]
    [atol] = [flag for flag in _make_tolerance_flags(method, method.cases[0]) if "f32_threshold" in flag]
    assert float(atol.partition("=")[2]) == pytest.approx(2.0**-8, rel=0.01)


def test_golden_format_preserves_criteria_but_flagfile_rejects(tmp_path, context):
    made = bundle(tmp_path, replace(case(), accept=("y: rmse<=0.1",)))
    write_format("golden", made, tmp_path / "golden", context=context)
    again = read(tmp_path / "golden", context)
    assert again.digest == made.digest
    assert again.methods[0].cases[0].accept == ("y: rmse<=0.1",)
    with pytest.raises(UsageError, match="supports tolerances only"):
        _make_tolerance_flags(made.methods[0], made.methods[0].cases[0])


def test_golden_format_separates_similar_method_names(tmp_path, context):
    one = program(tmp_path)
    signature = Signature(tuple(one.inputs), tuple(one.outputs))
    suites = [MethodTestSuite(name, [case()]) for name in ("f/x", "f:x")]
    made = Bundle.create(one, suites, signatures={"f/x": signature, "f:x": signature})
    write_format("golden", made, tmp_path / "golden", context=context)
    assert read(tmp_path / "golden", context).digest == made.digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(golden=2), "version 2"),
        (lambda d: d.update(main="x"), "'x' is missing from 'files'"),
        (lambda d: d.update(files=["../../etc/passwd", "main.bin"]), "not a path inside"),
        (lambda d: d.update(files=["missing.bin", "main.bin"]), "missing file 'missing.bin'"),
        (lambda d: d.update(files=[1]), "must be strings"),
        (lambda d: d.pop("made"), "must be an object"),
        (lambda d: d["methods"][0]["cases"][0].update(folder="../.."), "not a path inside"),
        (lambda d: d["methods"][0]["cases"][0].update(folder="nowhere"), "is not a directory"),
        (lambda d: d["methods"][0]["cases"][0].update(rtol="much"), "wrong type"),
        (lambda d: d["methods"][0]["cases"][0].update(rtol=10**400), "too large"),
        (lambda d: d["methods"][0]["cases"][0].update(folder="\u00e9" * 200), "exceeds 255 bytes"),
        (lambda d: d.update(files=["\u00e9" * 200, "main.bin"]), "exceeds 255 bytes"),
        (
            lambda d: d["methods"][0]["inputs"][0].update(dtype="float64"),
            "is 3x2 float32, but the method takes Nx2 float64",
        ),
        (lambda d: d["methods"][0].update(cases=[]), "no test cases"),
        (lambda d: d["made"].update(speed=float("nan")), "cannot store the bundle's metadata as JSON"),
    ],
)
def test_golden_format_rejects_invalid_document(golden, context, change, message):
    document = json.loads((golden / "golden.json").read_text())
    change(document)
    (golden / "golden.json").write_text(json.dumps(document))
    with pytest.raises(UsageError) as caught:
        read(golden, context)
    assert message in caught.value.message


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b"\xff", b"[]"])
def test_golden_format_rejects_invalid_json(golden, context, data):
    (golden / "golden.json").write_bytes(data)
    with pytest.raises(UsageError, match=r"invalid JSON|must be an object"):
        read(golden, context)


def test_golden_format_rejects_pickled_tensor(golden, context):
    (path,) = golden.glob("*/0-0/input_0.npy")
    np.save(path, np.array([{}], object), allow_pickle=True)
    with pytest.raises(UsageError, match=r"no.* readable \.npy"):
        read(golden, context)


@pytest.mark.parametrize(
    "shape", ["(1099511627776,)", "(1099511627776, 1099511627776)", "(4294967296,) * 4", "(-3, 2)"]
)
def test_golden_format_rejects_tensor_of_huge_shape(golden, context, shape):
    (path,) = golden.glob("*/0-0/input_0.npy")
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + b"\0" * 24)
    with pytest.raises(UsageError, match=r"readable \.npy|is .* float32, but the method takes"):
        read(golden, context)


def model(folder: Path, name: str = "model.onnx") -> Path:
    value = (TensorProto.FLOAT, ["N"])
    folder.mkdir(exist_ok=True)
    return save_model(folder / name, [helper.make_node("Add", ["x", "x"], ["y"])], [("x", *value)], [("y", *value)])


def test_onnx_format_needs_model_and_test_data(tmp_path, context):
    folder = tmp_path / "data"
    with pytest.raises(UsageError, match="not a directory with one ONNX model"):
        read(tmp_path / "nowhere", context, "onnx")
    model(folder)
    with pytest.raises(UsageError, match="no test data found"):
        read(folder, context, "onnx")
    cases = folder / "test_data_set_0"
    cases.mkdir()
    for name, values in {"input_0": [1, 2], "output_0": [2, 4]}.items():
        tensor = onnx.numpy_helper.from_array(np.array(values, np.float32))
        (cases / f"{name}.pb").write_bytes(tensor.SerializeToString())
    model(folder, "another.onnx")  # model.onnx takes precedence
    (method,) = read(folder, context, "onnx").methods
    assert [one.expected_outputs["y"].tolist() for one in method.cases] == [[2, 4]]
    (cases / "input_0.pb").write_bytes(b"no tensor")
    with pytest.raises(UsageError, match="not an ONNX tensor"):
        read(folder, context, "onnx")


def flagfiles(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.flagfile").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no flag file"),
        ({"a": "--function=f\n"}, "expected one --module, got 0"),
        ({"a": "--module=a.vmfb\n", "b": "--module=b.vmfb\n"}, "use different modules"),
        ({"a": "--module=a.vmfb\n"}, "no such file"),
        ({"a": "--modules=a.vmfb\n"}, "unknown flag --modules"),
    ],
)
def test_flagfile_format_requires_single_module(tmp_path, context, files, message):
    with pytest.raises(UsageError, match=message):
        read(flagfiles(tmp_path, **files), context, "flagfile")


def test_flagfile_format_rejects_unsupported_comparison(tmp_path, context):
    for dtype, rtol, message in [
        ("float8_e5m2", None, "cannot compare float8"),
        ("int32", 0.1, "compares integers exactly"),
    ]:
        spec = TensorSpec("x", dtype, (2,))
        value = make_random_tensor(spec, (2,), seed=1)
        artifact = replace(program(tmp_path, [spec], [spec]), runtime="iree")
        made = Bundle.create(artifact, [MethodTestSuite("f", [MethodTestCase([value], [value], rtol=rtol)])])
        with pytest.raises(UsageError, match=message):
            write_format("flagfile", made, tmp_path / "flags", context=context)
        assert not (tmp_path / "flags").exists()


@pytest.mark.parametrize(
    ("form", "message"), [("flagfile", "bundle has a program for none"), ("onnx", "expected an ONNX model")]
)
def test_write_format_rejects_program_of_other_runtime(tmp_path, context, form, message):
    with pytest.raises(UsageError, match=message):
        write_format(form, bundle(tmp_path), tmp_path / "out", context=context)


def test_onnx_format_rejects_bundle_with_two_methods(tmp_path, context):
    (tmp_path / "m.onnx").touch()
    signature = Signature(tuple(program(tmp_path).inputs), tuple(program(tmp_path).outputs))
    artifact = Artifact("onnxruntime", "m.onnx", {"m.onnx": tmp_path / "m.onnx"}, {}, "f", "none")
    suites = [MethodTestSuite("f", [case()])]
    made = Bundle.create(artifact, suites, signatures={"f": signature, "g": signature})
    with pytest.raises(UsageError, match="2 methods"):
        write_format("onnx", made, tmp_path / "out", context=context)
    assert not (tmp_path / "out").exists()


def test_unknown_format_error_suggests_name(tmp_path, context):
    with pytest.raises(UsageError) as caught:
        read_format("gold", tmp_path, context=context)
    assert "did you mean 'golden'" in caught.value.hint and "bpte" in caught.value.hint


def test_formats_have_summaries():
    assert all(isinstance(one, Format) and one.summary for one in load_formats().values())
    assert {"onnx", "flagfile", "golden", "bpte"} <= set(load_formats())


def test_golden_format_accepts_vendor_runtime(tmp_path, context):
    """A vendor's program round-trips through a golden directory."""
    spec = TensorSpec("x", "float32", (1,))
    (tmp_path / "p.bin").write_bytes(b"p")
    artifact = Artifact("vendor", "p.bin", {"p.bin": tmp_path / "p.bin"}, {}, "f", "vcc 1", (), (spec,), (spec,))
    value = np.ones(1, np.float32)
    made = Bundle.create(artifact, [MethodTestSuite("f", [MethodTestCase([value], [value])])])
    write_format("golden", made, tmp_path / "golden", context=context)
    assert read(tmp_path / "golden", context).program.runtime == "vendor"
