"""`hil init`: created files, existing files, questions and errors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from support.schemas import check_document
from support.workflows import find_violations, list_commands, list_uses, needs_shellcheck, shellcheck

from hil.controller.cli.main import cli
from hil.controller.pipeline.settings.project import load_project, read_project
from hil.controller.projects.discovery import find_boards, find_models
from hil.controller.projects.templates import ACTIONS, REPORTS
from hil.core.config_files import read_trusted, trust
from hil.errors import StorageError, UsageError

ROOT = Path(__file__).parents[4]
FILES = ["models/digits_cnn.onnx", "tests/test_models.py", "pytest.ini", ".gitignore"]
KITCHEN = '[board]\nhw_type = "rpi5"\ndescription = "in the kitchen"\n[connection]\naddress = "root@rpi5"\n'
Init = Callable[..., Result]


@pytest.fixture(autouse=True)
def fixed_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not import the models, because this takes half a second per test."""
    # An installation from an index, in which CI can install the same package.
    monkeypatch.setattr("hil.controller.projects.scaffold.is_from_index", lambda _: True)
    if "imports_model" not in request.node.name:
        monkeypatch.setattr("hil.controller.projects.scaffold._find_sizes", lambda _: ({}, []))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty home, an empty working directory and no terminal."""
    monkeypatch.setattr("hil.controller.storage.screen.prompts.can_ask", lambda: False)
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CONFIG_HOME", "HIL_BOARD", "HIL_BOARDS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def init(*words: str, answers: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["init", *words], input=answers, catch_exceptions=False)


def refuse(*words: str) -> UsageError:
    error = CliRunner().invoke(cli, ["init", *words]).exception
    assert isinstance(error, UsageError)
    return error


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Init:
    """Call `hil init` on a terminal with these answers."""
    monkeypatch.setattr("hil.controller.storage.screen.prompts.can_ask", lambda: True)

    def call(answers: str, *words: str) -> Result:
        return init(*words, answers=answers)

    return call


def test_init_creates_project_with_example() -> None:
    done = init("net", "--yes")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        *(f"created {name}" for name in [*FILES, ".github/workflows/models.yml", "hil.toml"]),
        "next:",
        "  cd net",
        "  hil run models/digits_cnn.onnx",
        "  pytest",
    ]
    project = load_project(Path("net"))
    assert project is not None
    assert (project.commands, project.models) == ({"board": "sim"}, {"digits_cnn.onnx": {"iterations": 10}})
    example = ROOT / "examples/digits/digits_cnn.onnx"
    assert Path("net/models/digits_cnn.onnx").read_bytes() == example.read_bytes()
    assert Path("net/pytest.ini").read_text().splitlines()[2:] == ["hil_models = models", "testpaths = tests"]


def test_init_uses_first_model_of_directory() -> None:
    for name in (".hidden/a.onnx", "env/a.onnx", "hil-runs/1/a.onnx", "z/b.TFLITE", "z/c.onnx", "z/readme.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("env/pyvenv.cfg").touch()
    Path("hil-runs/1/run.json").touch()
    assert find_models(Path()) == [Path("z/c.onnx"), Path("z/b.TFLITE")]
    Path("z/c.onnx").unlink()
    document = json.loads(init("--json").stdout)
    check_document(document, "init")
    assert (document["model"], document["next"]) == ("z/b.TFLITE", ["hil run z/b.TFLITE", "pytest"])
    assert "hil_models = z\n" in Path("pytest.ini").read_text()
    assert read_project(Path("hil.toml").absolute()).commands == {"board": "sim"}
    assert "hil[pytest,tflite]" in Path(".github/workflows/models.yml").read_text()


def test_init_adds_extras_of_all_tested_models() -> None:
    for name in ("models/a.onnx", "models/b.tflite", "other/c.mlir"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    assert init("--yes").exit_code == 0
    assert "hil[pytest,tflite]" in Path(".github/workflows/models.yml").read_text()


def test_init_imports_model_and_sets_sizes() -> None:
    done = init("--model", str(ROOT / "examples/digits/digits_cnn_batch.onnx"), "--yes")
    assert "note: check the sizes of dimensions in hil.toml: N=1" in done.stdout.splitlines()
    assert read_project(Path("hil.toml").absolute()).models["digits_cnn_batch.onnx"]["dims"] == {"N": 1}


def test_init_imports_models_and_sets_sizes_of_all() -> None:
    for name in ("a.onnx", "below/b.onnx"):
        Path("nets", name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "examples/digits/digits_cnn_batch.onnx", Path("nets", name))
    Path("nets/c.onnx").write_text("no model")
    done = init("--yes")
    assert "note: check the sizes of dimensions in hil.toml: a.onnx N=1; b.onnx N=1" in done.stdout.splitlines()
    assert "note: c.onnx: " in done.stdout
    models = read_project(Path("hil.toml").absolute()).models
    assert models == {"a.onnx": {"iterations": 10, "dims": {"N": 1}}, "b.onnx": {"dims": {"N": 1}}}


def test_init_imports_model_and_reports_invalid_model() -> None:
    Path("bad.onnx").write_text("no model")
    done = init("--yes")
    assert done.exit_code == 0 and "note: bad.onnx: " in done.stdout
    assert Path("hil.toml").exists()


def test_init_prefers_models_with_reference() -> None:
    for name in ("a.mlir", "b.tflite", "c.onnx"):
        Path(name).touch()
    assert find_models(Path()) == [Path("c.onnx"), Path("b.tflite"), Path("a.mlir")]


def test_init_explains_models_without_reference() -> None:
    Path("a.mlir").touch()
    lines = init("--yes").stdout.splitlines()
    assert "note: a.mlir has no independent reference: save tensors by name in a.inputs.npz and a.expected.npz" in lines
    assert lines[-2:] == ["  hil run a.mlir --input a.inputs.npz --expected a.expected.npz", "  pytest"]


def test_init_accepts_example_by_name() -> None:
    assert (
        json.loads(init("--model", "example:digits_cnn_int8", "--json").stdout)["model"]
        == "models/digits_cnn_int8.onnx"
    )


def test_init_copies_model_from_outside_with_its_data(tmp_path: Path) -> None:
    for name in ("m.onnx", "m.onnx.data", "m.inputs.npz", "other.onnx"):
        (tmp_path / name).write_text(name)
    init("net", "--model", str(tmp_path / "m.onnx"), "--yes")
    assert sorted(path.name for path in Path("net/models").iterdir()) == ["m.inputs.npz", "m.onnx", "m.onnx.data"]


def test_init_quotes_names() -> None:
    folder = Path("my nets")
    folder.mkdir()
    Path(folder, 'a "b"[1].onnx').touch()
    done = init("my nets", "--ci", "none")
    assert "  cd 'my nets'" in done.stdout.splitlines()
    assert list(read_project((folder / "hil.toml").absolute()).models) == ['a "b"[[]1].onnx']
    init("--yes")
    assert "hil_models = 'my nets'" in Path("pytest.ini").read_text().splitlines()


@pytest.mark.parametrize("name", [b"a\xff.onnx", b"a\n.onnx", b"a\x7f.onnx"])
def test_init_rejects_names_that_files_cannot_contain(name: bytes) -> None:
    Path(os.fsdecode(name)).touch()
    assert refuse("--yes").message.startswith("unsupported characters in 'a")
    assert [os.fsencode(path) for path in Path().iterdir()] == [name]


def test_init_writes_valid_test_for_any_directory() -> None:
    folder = Path('a"""b\\')
    folder.mkdir()
    (folder / "net.onnx").touch()
    assert init("--yes").exit_code == 0
    compile(Path("tests/test_models.py").read_text(), "test_models.py", "exec")


def test_init_rejects_existing_project() -> None:
    Path("hil.toml").write_text("[defaults]\nseed = 3\n")
    error = refuse("--yes")
    assert error.exit_code == 2 and error.message == ". already is a project: hil.toml exists"
    assert [path.name for path in Path().iterdir()] == ["hil.toml"]


def test_init_keeps_existing_files() -> None:
    Path("tests").mkdir()
    Path("tests/test_models.py").write_text("mine")
    Path(".gitignore").symlink_to("nowhere")
    done = init("--yes")
    assert "exists, not changed: tests/test_models.py" in done.stdout
    assert "exists, not changed: .gitignore" in done.stdout
    assert Path("tests/test_models.py").read_text() == "mine" and not Path("nowhere").exists()


@pytest.mark.parametrize(
    ("name", "text", "setting"),
    [
        (
            "pyproject.toml",
            "[tool.pytest.ini_options]\naddopts = '-q'\n",
            'hil_models = ["models"] to [tool.pytest.ini_options]',
        ),
        ("pyproject.toml", "[tool.pytest]\naddopts = ['-q']\n", 'hil_models = ["models"] to [tool.pytest]'),
        ("pyproject.toml", "[tool.ruff]\nline-length = 100\n", ""),
        ("pyproject.toml", "tool = 1\n", ""),
        ("setup.cfg", "[tool:pytest]\naddopts = -q\n", "hil_models = models to [tool:pytest]"),
        ("setup.cfg", "[metadata]\nname = x\n", ""),
        ("pytest.toml", "[pytest]\n", 'hil_models = ["models"] to [pytest]'),
    ],
)
def test_init_does_not_override_settings_of_pytest(name: str, text: str, setting: str) -> None:
    Path(name).write_text(text)
    notes = [line for line in init("--yes").stdout.splitlines() if line.startswith("note: ")]
    assert notes == ([f"note: {name} has settings of pytest: add {setting}"] if setting else [])
    assert Path("pytest.ini").exists() is not bool(setting)


@pytest.mark.parametrize(
    ("words", "noted"), [([], True), (["--package", "hil[pytest] @ file:///x"], False), (["--ci", "none"], False)]
)
def test_init_notes_package_that_ci_may_lack(words: list[str], noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hil.controller.projects.scaffold.is_from_index", lambda _: False)
    notes = [line for line in init("--yes", *words).stdout.splitlines() if line.startswith("note: ")]
    assert [("HIL_PACKAGE in .github/workflows/models.yml" in note) for note in notes] == [True] * noted


def test_init_asks_for_model_board_and_ci(ask: Init, home: Path) -> None:
    (home / ".ssh/config").write_text("Host pi lab-*\n  User root\nHost *\nInclude more\n")
    (home / ".ssh/more").write_text("Host nano\n")
    boards = home / ".config/hil/boards"
    boards.mkdir(parents=True)
    (boards / "kitchen.toml").write_text(KITCHEN)
    for name in ("a.onnx", "b.onnx"):
        Path(name).touch()
    done = ask("2\n3\ngitlab\n")
    shown = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert shown[:3] == ["1 a.onnx", "2 b.onnx", "3 example: digits_cnn.onnx"]
    assert {"1 sim simulator on this machine", "2 kitchen in the kitchen", "3 ssh:pi host in ~/.ssh/config"} < set(
        shown
    )
    assert "4 ssh:nano host in ~/.ssh/config" in shown
    project = load_project(Path())
    assert project is not None and list(project.models) == ["b.onnx"]
    assert project.use_board() == ("ssh:pi", "")  # the user chose the board, so the file is trusted
    assert Path(".gitlab-ci.yml").exists() and not Path(".github").exists()


def test_init_accepts_host_of_ssh_config(home: Path) -> None:
    (home / ".ssh" / "config").write_text("Host pi\n")
    assert init("--board", "pi", "--yes").exit_code == 0
    project = load_project(Path())
    assert project is not None and project.use_board() == ("pi", "")
    assert "self-hosted" in Path(".github/workflows/models.yml").read_text()


def test_init_asks_again_after_invalid_answer(ask: Init) -> None:
    done = ask("missing.onnx\n1\nkichen\n1\nnone\n")
    assert done.exit_code == 0
    assert "model missing.onnx not found" in done.stderr and "unknown board 'kichen'" in done.stderr


@pytest.mark.parametrize(
    ("words", "prompts"),
    [
        (["--yes"], []),
        (["--board", "sim"], ["Model", "CI system"]),
        (["--ci", "none", "--board", "sim-f16"], ["Model"]),
    ],
)
def test_init_asks_only_for_missing_options(ask: Init, words: list[str], prompts: list[str]) -> None:
    done = ask("\n\n\n", *words)
    assert done.exit_code == 0
    assert [one for one in ("Model", "Board", "CI system") if f"{one} (" in done.stdout] == prompts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["file"], "file is not a directory"),
        (["--model", "nope.onnx"], "model nope.onnx not found"),
        (["--model", "file"], "unsupported model file"),
        (["--board", "nope"], "unknown board 'nope'"),
    ],
)
def test_init_rejects_invalid_values(words: list[str], message: str) -> None:
    Path("file").touch()
    error = refuse(*words, "--yes")
    assert (error.exit_code, error.message) == (2, message) and error.hint
    assert not Path("hil.toml").exists()


def test_init_reports_unwritable_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", fail)
    error = refuse("net", "--yes")
    assert isinstance(error, StorageError) and error.message == "cannot create a project in net: Permission denied"


def test_gitlab_file_trusts_board_config_of_project() -> None:
    Path("board_configs").mkdir()
    Path("board_configs/kitchen.toml").write_text(KITCHEN)
    init("--board", "kitchen", "--ci", "gitlab", "--yes")
    script = yaml.safe_load(Path(".gitlab-ci.yml").read_text())["models"]["script"]
    assert script[:2] == ["hil doctor", "hil board trust board_configs"]


def test_init_keeps_trust_in_other_files(home: Path) -> None:
    Path("board_configs").mkdir()
    kitchen = Path("board_configs/kitchen.toml")
    kitchen.write_text(KITCHEN)
    trust(Path.cwd(), {kitchen: "x"})
    done = init("--board", "kitchen", "--yes")
    assert "note: review board_configs/kitchen.toml, then run in .: hil board trust ." in done.stdout.splitlines()
    assert '        run: "hil board trust board_configs"\n' in Path(".github/workflows/models.yml").read_text()
    assert sorted(Path(path).name for path in read_trusted()[str(Path.cwd())]) == ["hil.toml", "kitchen.toml"]
    assert [one.name for one in find_boards(Path())] == ["sim", "kitchen"]


def read_workflow(*words: str) -> dict[Any, Any]:
    init(*words, "--yes")
    found: dict[Any, Any] = yaml.safe_load(Path(".github/workflows/models.yml").read_text())
    return found


def test_github_workflow_follows_rules_of_repository() -> None:
    flow = read_workflow("--package", "hil[pytest] @ file:///x")
    assert list(find_violations(flow, 60)) == []
    (job,) = flow["jobs"].values()
    assert job["runs-on"] == "ubuntu-24.04" and "if" not in job
    assert job["env"] == {"HIL_PACKAGE": "hil[pytest] @ file:///x", "HIL_BOARD": "sim"}
    used = {name: f"actions/{name}@{version}" for name, version in ACTIONS.items()}
    assert list_uses(flow) == set(used.values())
    ours = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")]
    assert list_uses(flow) - set().union(*map(list_uses, ours)) == set(), "use the same versions as hil's workflows"


@needs_shellcheck
def test_ci_commands_pass_shellcheck() -> None:
    scripts = [command for _, command in list_commands(read_workflow())]
    init("other", "--ci", "gitlab", "--yes")
    job = yaml.safe_load(Path("other/.gitlab-ci.yml").read_text())["models"]
    scripts.append("\n".join([*job["before_script"], *job["script"]]))
    # SC1091: the virtual environment does not exist yet.
    assert [shellcheck("--shell=bash", "--exclude=SC1091", "-", script=script) for script in scripts] == [""] * 4
    assert scripts[1:3] == job["script"]


def test_github_workflow_for_board_refuses_forks() -> None:
    (job,) = read_workflow("--board", "root@rpi5")["jobs"].values()
    assert job["runs-on"] == ["self-hosted", "linux"] and "head.repo.full_name" in job["if"]
    assert job["env"]["HIL_BOARD"] == "root@rpi5"


def test_ci_files_of_subdirectory_are_at_top_of_repository() -> None:
    Path(".git").mkdir()
    done = init("nets/a b", "--yes")
    assert "created ../../.github/workflows/models-nets-a b.yml" in done.stdout.splitlines()
    (job,) = yaml.safe_load(Path(".github/workflows/models-nets-a b.yml").read_text())["jobs"].values()
    assert job["defaults"] == {"run": {"working-directory": "nets/a b"}}
    assert job["steps"][-1]["with"]["path"] == "nets/a b/hil-reports"
    init("nets/b", "--ci", "gitlab", "--yes")
    job = yaml.safe_load(Path(".gitlab-ci.yml").read_text())["models"]
    assert job["before_script"][-1] == "cd nets/b" and job["artifacts"]["paths"] == ["nets/b/hil-reports"]
    assert "exists, not changed: ../../.gitlab-ci.yml" in init("nets/c", "--ci", "gitlab").stdout


@pytest.mark.parametrize("board", ["sim", "root@rpi5"])
def test_gitlab_file_runs_tests_and_keeps_reports(board: str) -> None:
    init("--ci", "gitlab", "--board", board, "--yes")
    job = yaml.safe_load(Path(".gitlab-ci.yml").read_text())["models"]
    assert ("image" in job, "tags" in job) == (board == "sim", board != "sim")
    assert job["variables"]["HIL_BOARD"] == board
    assert job["artifacts"]["paths"] == [REPORTS]
    assert job["script"][0] == "hil doctor"
