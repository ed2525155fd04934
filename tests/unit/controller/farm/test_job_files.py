"""Test a job's files: collected at submission and located on the host."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.models import DIGITS

from hil.controller.farm.job_files import (
    JobFiles,
    find_key,
    find_profiles,
    pack_bundle,
    pack_run,
    rebuild_job,
    request_of,
)
from hil.controller.farm.messages import JobSpec, Kind
from hil.controller.models.importers import import_model
from hil.controller.pipeline.settings.flagfiles import read_flagfile
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.base import make_record
from hil.controller.workloads.suites.request import SuiteRequest
from hil.errors import UsageError


def sent(spec: JobSpec, parcel: JobFiles, host: Path) -> JobSpec:
    """Return the spec as read by a host, with its files."""
    files = parcel.list_uploads()
    for at, digest in spec.files.items():
        (host / at).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(files[digest], host / at)
    return make_record(json.loads(json.dumps(spec.to_json())), JobSpec)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros(4, "float32"))
    np.savez("all.npz", x=np.zeros(4, "float32"), y=np.ones(4, "float32"))
    Path("bytes.bin").write_bytes(bytes(16))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "before", "file", "after"),
    [
        ("x=x.npy", "x=", "x.npy", ""),
        ("x.npy", "", "x.npy", ""),
        ("@x.npy", "@", "x.npy", ""),
        ("all.npz", "", "all.npz", ""),
        ("x=all.npz:y", "x=", "all.npz", ":y"),
        ("4xf32=@bytes.bin", "4xf32=@", "bytes.bin", ""),
        ("a=b=4xf32=@bytes.bin", "a=b=4xf32=@", "bytes.bin", ""),
    ],
)
def test_add_tensor_replaces_only_file_in_text(here, text, before, file, after):
    parcel = JobFiles()
    found = parcel.add_tensor(text, "inputs")
    assert (found[0], found[2]) == (before, after)
    assert parcel.files == {found[1]: Path(file)}
    assert found[1].startswith("inputs/")
    assert Path(found[1]).suffix == Path(file).suffix


@pytest.mark.parametrize("text", ["4xf32=1 2 3 4", "7", "x=4xf32", "4x8xf32=2"])
def test_add_tensor_accepts_text_without_file(here, text):
    parcel = JobFiles()
    assert parcel.add_tensor(text, "inputs") == [text]
    assert not parcel.files


@pytest.mark.parametrize("text", ["gone.npy", "x=gone.npz:y", "4xf32=@gone.bin"])
def test_add_tensor_rejects_missing_file(here, text):
    with pytest.raises(UsageError, match=r"no such file: gone\.\w+"):
        JobFiles().add_tensor(text, "inputs")


def test_packed_run_requests_profiles_in_result(here):
    job = Job(models=(DIGITS / "digits_cnn.onnx",), profile=Path("mine"))
    spec, parcel = pack_run(job, import_model(job.models[0]))
    assert find_profiles(spec.options) == ["run"]
    host = sent(spec, parcel, here / "host")
    assert (
        rebuild_job({**host.options, "profile": "/etc", "compile_time_profile": "/etc"}, here / "host").profile is None
    )


@pytest.mark.parametrize("wanted", [None, "run", 7, ["other"], [["run"]]])
def test_find_profiles_ignores_unknown_values(wanted):
    assert find_profiles({"profiles": wanted}) == []


def test_packed_run_restores_job_on_host(here):
    host = here / "host"
    job = Job(
        models=(DIGITS / "digits_cnn.onnx",),
        board="rpi5",
        inputs=("image=x.npy",),
        expected=("all.npz",),
        dims={"N": 2},
        input_range=(-1.0, 1.0),
        rtol=1e-3,
        compile_flags=("--iree-opt-level=O3",),
        iterations=5,
        out=Path("hil-runs"),
        debug_ir=Path("ir"),
    )
    spec, parcel = pack_run(job, import_model(job.models[0]))
    found = rebuild_job(sent(spec, parcel, host).options, host)
    assert spec.kind is Kind.RUN
    assert found.models == (host / "model/digits_cnn.onnx",)
    assert found.models[0].read_bytes() == job.models[0].read_bytes()
    (text,) = found.inputs
    assert Path(text.removeprefix("image=")).read_bytes() == Path("x.npy").read_bytes()
    assert (found.dims, found.input_range, found.rtol, found.iterations) == ({"N": 2}, (-1.0, 1.0), 1e-3, 5)
    assert found.compile_flags == job.compile_flags
    # Local settings are not sent.
    assert (found.board, found.out, found.debug_ir) == ("", None, None)


def test_packed_run_sends_generation_with_tokenizer(here):
    (here / "spec").mkdir()
    spec_file = here / "spec/chat.toml"
    files = "tokenizer = './words/tokenizer.json'\nreference = 'exact/net.onnx'"
    spec_file.write_text(f"{files}\n[[prompt]]\ntext = 'hello'\n[[prompt]]\nfile = 'text.txt'\n")
    (here / "spec/text.txt").write_text("hello")
    (here / "spec/exact").mkdir()
    shutil.copy(DIGITS / "digits_cnn.onnx", here / "spec/exact/net.onnx")
    (here / "spec/words").mkdir()
    (here / "spec/words/tokenizer.json").write_text("{}")
    job = Job(models=(DIGITS / "digits_cnn.onnx",), generate=spec_file)
    spec, parcel = pack_run(job, import_model(job.models[0]))
    host = here / "host"
    found = rebuild_job(sent(spec, parcel, host).options, host)
    assert found.generate == host / "generate/chat.toml"
    assert (found.generate.parent / "words/tokenizer.json").read_text() == "{}"
    assert (found.generate.parent / "text.txt").read_text() == "hello"
    assert (found.generate.parent / "exact/net.onnx").exists()


@pytest.mark.ci
@pytest.mark.parametrize("name", ["/etc/passwd", "../tokenizer.json", "a/../../tokenizer.json"])
@pytest.mark.parametrize("key", ["tokenizer", "reference", "[[prompt]]\nfile"])
def test_files_outside_specification_directory_are_rejected(here, key, name):
    spec = here / "chat.toml"
    spec.write_text(f"{key} = {name!r}\n[[prompt]]\ntext = 'hello'\n")
    model = import_model(DIGITS / "digits_cnn.onnx")
    with pytest.raises(UsageError, match=r"file .* is outside the directory"):
        pack_run(Job(models=(model.path,), generate=spec), model)
    with pytest.raises(UsageError, match=r"file .* is outside the directory"):
        rebuild_job({"models": ["m"], "generate": "chat.toml"}, here)


def test_affinity_depends_only_on_program(here):
    model = import_model(DIGITS / "digits_cnn.onnx")
    job = Job(models=(model.path,), runtime="iree")
    first = pack_run(job, model)[0].affinity
    assert first == pack_run(Job(models=job.models, runtime="iree", seed=7, iterations=3), model)[0].affinity
    assert first != pack_run(Job(models=job.models, runtime="onnxruntime"), model)[0].affinity
    assert first != pack_run(Job(models=job.models, runtime="iree", compile_flags=("-x",)), model)[0].affinity


@pytest.mark.parametrize(
    ("name", "asked", "needs"),
    [
        ("digits/digits_cnn.onnx", "", ""),
        ("digits/digits_cnn.onnx", "onnxruntime", "onnxruntime"),
        ("tflite/digits.tflite", "", "tflite"),
    ],
)
def test_packed_run_records_required_runtime(here, name, asked, needs):
    path = DIGITS.parent / name
    spec, _ = pack_run(Job(models=(path,), runtime=asked), import_model(path))
    assert spec.options["needs"] == needs


def test_packed_run_includes_external_data(here):
    model = onnx.load(DIGITS / "digits_cnn.onnx")
    big = max(model.graph.initializer, key=lambda tensor: numpy_helper.to_array(tensor).size)
    onnx.save(model, "net.onnx", save_as_external_data=True, location="net.data", size_threshold=16)
    assert Path("net.data").stat().st_size >= numpy_helper.to_array(big).nbytes
    spec, parcel = pack_run(Job(models=(Path("net.onnx"),)), import_model(Path("net.onnx")))
    assert sorted(spec.files) == ["model/net.data", "model/net.onnx"]
    again, twice = pack_run(Job(models=(Path("net.onnx"),)), import_model(Path("net.onnx")))
    assert (
        {**parcel.list_uploads(), **twice.list_uploads()}.keys()
        == set(spec.files.values())
        == set(again.files.values())
    )


def test_packed_bundle_includes_methods_and_key(here):
    Path("net.hilb").write_bytes(b"bundle")
    Path("keys.pub").write_text("ssh-ed25519 AAAA me\n")
    spec, parcel = pack_bundle(Job(models=(Path("net.hilb"),), atol=0.5), "iree", ["main"], Path("keys.pub"))
    host = here / "host"
    options = sent(spec, parcel, host).options
    assert (options["methods"], options["needs"]) == (["main"], "iree")
    assert find_key(options, host) == host / "key/keys.pub"
    assert rebuild_job(options, host).models == (host / "bundle/net.hilb",)
    assert rebuild_job(options, host).atol == 0.5
    without, parcel = pack_bundle(Job(models=(Path("net.hilb"),)), "iree", [], None)
    assert find_key(without.options, host) is None


def test_flag_file_resolves_before_submission(here):
    Path("flags").mkdir()
    np.save("flags/x.npy", np.zeros(4, "float32"))
    Path("flags/run.txt").write_text(f"--module={DIGITS / 'digits_cnn.onnx'}\n--input=@x.npy\n")
    job = read_flagfile(Job(flagfile=Path("flags/run.txt")))
    parcel = JobFiles()
    assert job.flagfile is None
    assert job.models == (DIGITS / "digits_cnn.onnx",)
    assert parcel.add_tensor(job.inputs[0], "inputs")[0] == "@"


@pytest.mark.parametrize("options", [{}, {"models": 3}, {"models": ["a"], "inputs": [["a", "b"]]}])
def test_job_of_rejects_malformed_options(options, tmp_path):
    with pytest.raises(UsageError, match="invalid job: "):
        rebuild_job(options, tmp_path)


def test_request_of_rejects_malformed_suite(tmp_path):
    with pytest.raises(UsageError, match="invalid suite: "):
        request_of({"source": "@models"}, tmp_path)


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/model.onnx", "model/../../x"])
def test_job_of_rejects_paths_outside_job_directory(path, tmp_path):
    for options in (
        {"models": [path]},
        {"models": ["m"], "inputs": [["x=", path, ""]]},
        {"models": ["m"], "expected": [["", path, ""]]},
        {"models": ["m"], "generate": path},
    ):
        with pytest.raises(UsageError, match="outside the job's directory"):
            rebuild_job(options, tmp_path)
    with pytest.raises(UsageError, match="outside the job's directory"):
        find_key({"key": path}, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        ["/etc/x.npy"],
        ["x=../x.npz"],
        ["x=/etc/x.npz:key"],
        ["x=/etc/x.npy/"],
        ["x=/etc/x.npy/."],
        ["/etc/x.npz//./"],
        ["x=/etc/x.pb/."],
        ["4xf32=@/etc/passwd"],
        ["/etc/x.npz:", "a", ""],
        ["4xf32=@/etc/passwd ", "a", ""],
        ["4xf32=@/etc/passwd=", "a", ""],
        ["../", "a", ""],
        ["x=", "a", "/../../x.npy"],
        ["x=", "a.npz", ":/../../x.npy"],
    ],
)
def test_job_of_rejects_tensor_files_outside_job_directory(text, tmp_path):
    with pytest.raises(UsageError, match="missing in the job's files"):
        rebuild_job({"models": ["m"], "inputs": [text]}, tmp_path)


def test_job_of_ignores_settings_of_host(tmp_path):
    local = ("board", "out", "identity", "known_hosts", "debug_ir", "flagfile", "profile", "compile_time_profile")
    found = rebuild_job({"models": ["m"], **dict.fromkeys(local, "/elsewhere")}, tmp_path)
    assert found == Job((tmp_path / "m",))


def test_request_of_rejects_paths_outside_job_directory(tmp_path):
    good = json.loads(json.dumps(SuiteRequest("suite").to_json()))
    for bad in ({"source": "/home"}, {"source": "../x"}, {"flow": "/etc/flows.toml", "flow_is_file": True}):
        with pytest.raises(UsageError, match="outside the job's directory"):
            request_of({**good, **bad}, tmp_path)
    for flow in ("/etc/flows.toml", "flows.toml:mine"):
        with pytest.raises(UsageError, match="missing in the job's files"):
            request_of({**good, "flow": flow}, tmp_path)
    settings = {**good["settings"], "debug_ir": "/elsewhere"}
    assert request_of({**good, "settings": settings}, tmp_path).settings.debug_ir is None


@pytest.mark.parametrize(
    "line",
    [
        "--module=/etc/x.vmfb",
        "--module=../../../x.vmfb",
        "--parameters=/etc/x.irpa",
        "--parameters=model=../../../x.irpa",
        "--input=16xi8=@/etc/passwd",
        "--input=@../../../x.npy",
        "--input=x=/etc/x.npy",
        "--input=/etc/x.npy/.",
        "--expected_output=@/etc/x.npz:key",
    ],
)
def test_request_of_rejects_flag_file_paths_outside_suite(line, tmp_path):
    suite = tmp_path / "suite" / "mine"
    suite.mkdir(parents=True)
    request = json.loads(json.dumps(SuiteRequest("suite/mine").to_json()))
    mine = ["--module=net.vmfb", "--input=4xf32=@x.bin", "--input=2xf32=1 2", "--expected_output=@y.npy"]
    (suite / "net.flagfile").write_text("\n".join(mine))
    assert request_of(request, tmp_path).source == str(suite)
    (suite / "net.flagfile").write_text("\n".join([*mine, line]))
    with pytest.raises(UsageError, match="missing in the job's files"):
        request_of(request, tmp_path)


def test_request_of_rejects_tokenizer_outside_suite(tmp_path):
    suite = tmp_path / "suite" / "mine"
    suite.mkdir(parents=True)
    request = json.loads(json.dumps(SuiteRequest("suite/mine").to_json()))
    spec = suite / "net.generate.toml"
    spec.write_text("invalid")  # the case reports it
    assert request_of(request, tmp_path).source == str(suite)
    for text in ("tokenizer = '/etc/passwd'\n[[prompt]]\ntext = 'hello'\n", "[[prompt]]\nfile = '/etc/passwd'\n"):
        spec.write_text(text)
        with pytest.raises(UsageError, match="is outside the directory"):
            request_of(request, tmp_path)


def test_farm_jobs_reject_python_functions(here):
    """A submitter must not run code on the farm's host, even with a modified hil."""
    text = "y: python:/etc/judge.py:same"
    with pytest.raises(UsageError, match="Python function cannot be used here"):
        pack_run(Job(models=(DIGITS / "digits_cnn.onnx",), accept=(text,)), import_model(DIGITS / "digits_cnn.onnx"))
    spec, _ = pack_run(
        Job(models=(DIGITS / "digits_cnn.onnx",), accept=("logits: argmax",)), import_model(DIGITS / "digits_cnn.onnx")
    )
    assert rebuild_job(spec.options, here).accept == ("logits: argmax",)
    with pytest.raises(UsageError, match="Python function cannot be used here"):
        rebuild_job({**spec.options, "accept": [text]}, here)
    request = SuiteRequest("@models", "iree", (), "", {}).to_json()
    for own in ({"accept": [text]}, {"per_model": {"*": {"accept": [text]}}}):
        with pytest.raises(UsageError, match="Python function cannot be used here"):
            request_of({**request, "settings": {**request["settings"], **own}}, here)
    with pytest.raises(UsageError, match="must be a table"):
        request_of({**request, "settings": {**request["settings"], "per_model": 3}}, here)


def test_pack_run_includes_inputs_next_to_model(here):
    model = shutil.copy(DIGITS / "digits_cnn.onnx", "net.onnx")
    np.savez("net.inputs.npz", image=np.zeros((1, 1, 8, 8), "float32"))
    spec, parcel = pack_run(Job(models=(Path(model),)), import_model(Path(model)))
    ((before, file, after),) = spec.options["inputs"]
    assert (before, after, parcel.files[file]) == ("", "", Path("net.inputs.npz"))


def test_rebuilt_job_never_calls_function_of_submitter(here):
    Path("load.py").write_text("raise SystemExit('called')")
    model = DIGITS / "digits_cnn.onnx"
    spec, parcel = pack_run(Job(models=(model,), inputs=("load.py:make",)), import_model(model))
    assert rebuild_job(sent(spec, parcel, here / "host").options, here / "host").inputs == ("load.py:make",)
