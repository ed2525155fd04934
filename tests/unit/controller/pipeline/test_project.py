"""The project file: search, contents and precedence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper

from hil.controller.cli.main import cli
from hil.controller.cli.project.config_files import CONFIG_FILES
from hil.controller.pipeline.settings.history_settings import HistorySettings
from hil.controller.pipeline.settings.model_settings import apply_model_settings, check_models
from hil.controller.pipeline.settings.options import Job, Options
from hil.controller.pipeline.settings.project import find_history, find_project, load_project, read_project
from hil.controller.projects.config_schema import make_schema
from hil.controller.storage.history.place import HistoryPlace
from hil.core.text import convert_to_json
from hil.errors import UsageError

Write = Callable[[str], Path]
FLOAT = [("x", TensorProto.FLOAT, (2,))], [("y", TensorProto.FLOAT, (2,))]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write the project file of the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def make(text: str) -> Path:
        (tmp_path / "hil.toml").write_text(text)
        return tmp_path / "hil.toml"

    return make


@pytest.mark.parametrize("end", [".git", "home"])
def test_project_search_ends_at_repository_or_home(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "above" / "top" / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "above" / "hil.toml").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "above" / "top") if end == "home" else "/nowhere")
    if end == ".git":
        (tmp_path / "above" / "top" / ".git").mkdir()
    assert find_project(inner) is None
    (tmp_path / "above" / "top" / "hil.toml").touch()
    assert find_project(inner) == tmp_path / "above" / "top" / "hil.toml"
    (inner / "hil.toml").touch()
    assert find_project(inner) == inner / "hil.toml"


def test_project_search_skips_unrelated_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    (tmp_path / "inner").mkdir()
    (tmp_path / "hil.toml").touch()
    assert find_project(tmp_path / "inner") is None
    assert find_project(tmp_path) == tmp_path / "hil.toml"


def test_read_project_reads_defaults_models_and_outputs(write: Write) -> None:
    found = read_project(
        write(
            """
            [defaults]
            rtol = 0.5
            references = ["onnxruntime"]
            no_fallback = true
            timeout = 5
            [models."*.onnx"]
            dims = ["N=4"]
            accept = ["rmse<=1"]
            [models."*.onnx".outputs."logits:0"]
            accept = ["argmax", "kl<=1"]
            """
        )
    )
    assert found.defaults == {"rtol": 0.5, "references": ("onnxruntime",), "no_fallback": True, "timeout": 5}
    accept = ("rmse<=1", "logits:0: argmax", "logits:0: kl<=1")
    assert found.models == {"*.onnx": {"dims": {"N": 4}, "accept": accept}}
    assert found.asks == ()


def test_read_project_resolves_paths_against_its_directory(write: Write) -> None:
    path = write('[defaults]\ngenerate = "a.toml"\n[models.x]\ngenerate = "b/c.toml"')
    found = read_project(path)
    assert found.defaults == {"generate": str(path.parent / "a.toml")}
    own = check_models(found.models)["x"]
    assert own == {"generate": path.parent / "b" / "c.toml"}


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[defaults", "cannot be read", ""),
        ("[default]\n", "unknown table [default]", "did you mean 'defaults'"),
        ("defaults = 3\n", "[defaults] must be a table", ""),
        ("[defaults]\nrtoll = 1", "unknown key 'rtoll' in [defaults]", "did you mean 'rtol'"),
        ('[defaults]\ninputs = ["x.npy"]', "unknown key 'inputs' in [defaults]", ""),
        ("[defaults]\nrtol = true", "[defaults] rtol must be a number, got True", ""),
        ("[defaults]\niterations = 1.5", "iterations must be a whole number", ""),
        ('[defaults]\naccept = "argmax"', "accept must be a list of strings", 'accept = ["argmax"]'),
        ("[defaults]\ndims = { N = 2 }", "dims must be a list of strings", 'for example dims = ["N=2"]'),
        ("[models.x]\ndims.N = [2]", "dims must be a list of strings", 'for example dims = ["NAME='),
        ("[models.x]\ndims = 2", "dims must be a list of strings", 'for example dims = ["NAME='),
        ("[defaults]\nno_fallback = 1", "no_fallback must be true or false", ""),
        ('[defaults]\naccept = ["kll<=1"]', "[defaults] accept 'kll<=1' at character 1: unknown criterion", "'kl'"),
        ('[defaults]\naccept = ["top1>=0"]', "cannot fail", ""),
        ("[models]\nx = 3", '[models."x"] must be a table', ""),
        ("[models.x]\nrtoll = 1", "unknown key 'rtoll' in [models.\"x\"]", "did you mean 'rtol'"),
        ('[models.x]\ndims = ["N"]', "dims 'N': expected NAME=SIZE", ""),
        ('[models.x]\ndevice = "vulkan"', "unknown key 'device' in [models.\"x\"]", ""),
        ('[models.x]\nlabels = ["a"]', "unknown key 'labels' in [models.\"x\"]", "outputs"),
        ("[defaults]\niterations = 0", "[defaults] iterations must be a whole number from 1 to", ""),
        ("[models.x]\niterations = 0", '[models."x"] iterations must be a whole number from 1 to', ""),
        ("[defaults]\ntimeout = -1", "[defaults] timeout must be a number of seconds from 0", ""),
        ("[defaults]\ntimeout = 0", "[defaults] timeout must be above 0 seconds", ""),
        ("[defaults]\nrtol = -1", "[defaults] rtol: rtol is -1", "set rtol to"),
        ('[defaults]\narithmetic = "flaot16"', "[defaults] arithmetic: unknown arithmetic", "did you mean 'float16'"),
        ('[defaults]\nflow = "irre"', "[defaults] flow 'irre' not found", "did you mean 'iree'"),
        ('[defaults]\nreferences = ["onnxrt"]', "references: reference 'onnxrt' not found", "'onnxruntime'"),
        ('[defaults]\ninput_range = "3:1"', "[defaults] input_range '3:1': expected LOW:HIGH", ""),
        ("[models.x.outputs]\ny = 3", '[models."x".outputs."y"] must be a table', ""),
        ("[models.x.outputs.y]\nrtol = 3", '[models."x".outputs."y"] supports only accept', ""),
        ("history = 3\n", "[history] must be a table", ""),
        ("[history]\nquota_mb = 3", "unknown key 'quota_mb' in [history]", "did you mean 'quota'"),
        ('[history]\nquota = "2 GB"', "[history] quota must be a size such as", ""),
        ("[history]\nauto = 1", "[history] auto must be true or false, got 1", ""),
        ('[history]\npath = ""', "[history] path must be a string", ""),
        ('[models.x.outputs.y]\naccept = ["z: argmax"]', "'z: argmax' must not name an output", ""),
    ],
)
def test_read_project_error_names_file_and_key(write: Write, text: str, message: str, hint: str) -> None:
    path = write(text)
    with pytest.raises(UsageError) as caught:
        read_project(path)
    assert str(path) in caught.value.message
    assert message in caught.value.message and hint in caught.value.hint


def test_hint_for_model_key_lists_only_valid_keys(write: Write) -> None:
    with pytest.raises(UsageError) as caught:
        read_project(write("[models.x]\nlabel = 3"))
    assert not {"labels", "debug_ir", "recompute", "instructions"} & set(caught.value.hint.split(", "))
    for name in caught.value.hint.partition("known keys: ")[2].removesuffix(", outputs").split(", "):
        with pytest.raises(UsageError) as refused:
            read_project(write(f"[models.x]\n{name} = {{}}"))
        assert "unknown" not in refused.value.message, name


def test_history_settings_are_relative_to_the_file(write: Write, tmp_path: Path, monkeypatch: Any) -> None:
    write('[history]\nquota = "3 MiB"\nauto = true\nbaseline = "trunk"')
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    found = find_history(Path())
    assert found == HistorySettings(HistoryPlace(tmp_path / "hil-runs" / "history"), 3 << 20, True, "trunk")
    write('[history]\npath = "kept"')
    assert find_history(Path()).place == HistoryPlace(tmp_path / "kept")


def test_history_outside_of_the_project_needs_trust(write: Write, tmp_path: Path) -> None:
    write('[defaults]\ncompile_flags = ["-a"]\n[history]\nauto = true')
    assert find_history(tmp_path).auto
    write('[history]\npath = "../elsewhere"')
    with pytest.raises(UsageError, match=r"need trust: \[history\] path"):
        find_history(tmp_path)
    write('[history]\npath = "postgresql://lab/history"')
    with pytest.raises(UsageError, match=r"need trust: \[history\] path"):
        find_history(tmp_path)


def test_history_settings_accept_postgresql_url(write: Write, tmp_path: Path) -> None:
    url = "postgresql://anna:secret@lab/history?sslmode=require"
    found = read_project(write(f'[history]\npath = "{url}"')).history.place
    assert found == HistoryPlace(tmp_path / "hil-runs" / "history", url)
    assert str(found) == "postgresql://lab/history"
    with pytest.raises(UsageError, match="invalid history 'mysql://lab/history'"):
        read_project(write('[history]\npath = "mysql://anna:secret@lab/history"'))


def test_read_project_limits_file_size(write: Write) -> None:
    path = write("")
    os.truncate(path, 1 << 30)
    with pytest.raises(UsageError, match="1073741824 bytes"):
        read_project(path)


def test_python_functions_and_flags_need_trust(write: Write, tmp_path: Path) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text("def same(a, b): return True\n")
    path = write('[defaults]\ncompile_flags = ["--x"]\n[models.m.outputs.y]\naccept = ["python:judge.py:same"]\n')
    assert read_project(path).models["m"]["accept"] == (f"y: python:{judge}:same",)
    with pytest.raises(UsageError) as caught:
        load_project(tmp_path)
    assert "[defaults] compile_flags" in caught.value.message and "python" in caught.value.message
    assert f"hil board trust {tmp_path}" in caught.value.hint
    assert CliRunner().invoke(cli, ["board", "trust", str(tmp_path)], catch_exceptions=False).exit_code == 0
    assert load_project(tmp_path) is not None
    judge.write_text("def same(a, b): return 1 / 0\n")
    with pytest.raises(UsageError, match="has been altered"):
        load_project(tmp_path)


def test_plain_settings_do_not_need_trust(write: Write, tmp_path: Path) -> None:
    write('[defaults]\naccept = ["argmax"]\nrtol = 0.1\n')
    assert load_project(tmp_path) is not None


def test_for_model_applies_patterns_in_order() -> None:
    options = Options(rtol=0.5, per_model={"*.onnx": {"rtol": 0.1, "atol": 1.0}, "models/b.*": {"rtol": 0.2}})
    assert apply_model_settings(options, Path("models/a.onnx")) == Options(rtol=0.1, atol=1.0)
    assert apply_model_settings(options, Path("models/b.onnx")) == Options(rtol=0.2, atol=1.0)
    assert apply_model_settings(options, Path("c.mlir")) == Options(rtol=0.5)


def test_for_model_merges_dimension_sizes() -> None:
    per_model = {"*.onnx": {"dims": {"N": 4, "S": "1..8"}}, "b.*": {"dims": {"S": 2}}}
    options = Options(dims={"N": 1, "C": 3, "S": "1..64", "T": "1..2"}, per_model=per_model)
    a, b, c = (apply_model_settings(options, Path(name)) for name in ("a.onnx", "b.onnx", "c.mlir"))
    assert (a.dims, a.dim_ranges) == ({"N": 4, "C": 3}, {"S": (1, 8), "T": (1, 2)})
    assert (b.dims, b.dim_ranges) == ({"N": 4, "C": 3, "S": 2}, {"T": (1, 2)})
    assert (c.dims, c.dim_ranges) == (options.dims, options.dim_ranges)


def test_model_settings_round_trip() -> None:
    job = Job(per_model={"*.onnx": {"accept": ("argmax",), "dims": {"N": 4}}})
    again = Job.from_record(json.loads(json.dumps(convert_to_json(vars(job)))))
    assert apply_model_settings(again, Path("a.onnx")) == Job(accept=("argmax",), dims={"N": 4})


@pytest.mark.parametrize("damaged", [3, {"x": 3}, {"x": {"nope": 1}}, {"x": {"rtol": "1"}}, {"x": {"debug_ir": "d"}}])
def test_damaged_model_settings_raise_usage_error(damaged: Any) -> None:
    with pytest.raises(UsageError):
        check_models(damaged)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Return a function that returns the job of `hil run MODEL` with these arguments."""

    def ask(*words: str) -> Job:
        jobs: list[Job] = []

        def run(job: Job, **_: Any) -> Any:
            jobs.append(job)
            raise UsageError("stop")

        monkeypatch.setattr("hil.controller.workloads.run_job.run_job", run)
        result: Result = CliRunner().invoke(cli, ["run", "m.onnx", *words])
        assert jobs, result.output
        return jobs[0]

    return ask


def test_command_line_overrides_project_file(write: Write, asked: Callable[..., Job]) -> None:
    write(
        '[defaults]\nrtol = 0.1\nseed = 5\nruntime = "onnxruntime"\naccept = ["argmax"]\nno_fallback = true\n'
        '[models."*.onnx"]\nrtol = 0.3\natol = 0.4\n'
    )
    job = asked()
    assert (job.rtol, job.seed, job.runtime, job.accept, job.no_fallback) == (0.1, 5, "onnxruntime", ("argmax",), True)
    assert apply_model_settings(job, Path("m.onnx")).rtol == 0.3
    given = asked("--rtol", "0.2", "--accept", "kl<=1", "--seed", "6", "--runtime", "iree")
    assert (given.rtol, given.seed, given.runtime, given.accept) == (0.2, 6, "iree", ("kl<=1",))
    own = apply_model_settings(given, Path("m.onnx"))
    assert (own.rtol, own.atol) == (0.2, 0.4)


@pytest.mark.ci
def test_banner_lists_matching_tables(write: Write, save_onnx: Callable[..., Path]) -> None:
    path = write('[models."m.*"]\nrtol = 0.3\n[models."other.onnx"]\natol = 0.4\n')
    model = save_onnx([helper.make_node("Neg", ["x"], ["y"])], *FLOAT, name="m.onnx")
    done = CliRunner().invoke(cli, ["run", str(model), "--board", "nope"])
    assert done.stderr.splitlines()[0] == f'hil: {path}: models."m.*"'
    # A suite's models are not known when the command begins.
    done = CliRunner().invoke(cli, ["suite", "list", "@models"])
    assert 'models."m.*", models."other.onnx"' in done.stderr


def test_criterion_of_missing_output_raises_usage_error(write: Write, save_onnx: Callable[..., Path]) -> None:
    write('[models."*.onnx".outputs."yy"]\naccept = ["argmax"]\n')
    model = save_onnx([helper.make_node("Neg", ["x"], ["y"])], *FLOAT, name="m.onnx")
    done = CliRunner().invoke(cli, ["run", str(model), "--board", "sim"])
    assert isinstance(done.exception, UsageError)
    assert done.exception.message == "criterion for unknown output 'yy'"
    assert done.exception.hint == "did you mean 'y'? outputs: y"


def test_invalid_project_file_stops_command_but_not_help(write: Write) -> None:
    path = write("[defaults]\nrtoll = 1\n")
    done = CliRunner().invoke(cli, ["run", "m.onnx"])
    assert isinstance(done.exception, UsageError) and str(path) in done.exception.message
    assert CliRunner().invoke(cli, ["run", "--help"]).exit_code == 0
    assert CliRunner().invoke(cli, ["cache", "--help"]).exit_code == 0


# --- the schema ------------------------------------------------------------------------------------------------------

SCHEMA = json.loads(make_schema(CONFIG_FILES["project"]))
# Valid values of options that refuse some values of their type.
OWN_VALUES = {
    ("flow", "string"): '"iree"',
    ("input_range", "string"): '"0:1"',
    ("arithmetic", "string"): '"float16"',
    ("rtol", "integer"): "0",
}
VALUES = {"array": "[]", "boolean": "true", "integer": "3", "number": "0.5", "string": '"5"'}


@pytest.mark.parametrize("name", SCHEMA["properties"]["defaults"]["properties"])
def test_schema_and_reader_accept_same_types(name: str, write: Write) -> None:
    wanted = SCHEMA["properties"]["defaults"]["properties"][name]["type"]
    for kind, value in VALUES.items():
        path = write(f"[defaults]\n{name} = {OWN_VALUES.get((name, kind), value)}\n")
        if kind == wanted or (kind, wanted) == ("integer", "number"):
            project = read_project(path)
            assert name in {**project.defaults, **project.commands}
        else:
            with pytest.raises(UsageError, match=f"{name} must be"):
                read_project(path)
