"""Create a project: hil.toml, a first test, pytest's settings, a CI file and, if there is no model, an example."""

from __future__ import annotations

import json
import os
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from hil.controller.devices.choosing.board_resolver import is_address, is_alias
from hil.controller.devices.ssh.aliases import list_aliases
from hil.controller.models.importers import import_model
from hil.controller.models.sizing.size_hints import suggest_sizes
from hil.controller.pipeline.settings.project import FILE, read_project
from hil.controller.projects import templates
from hil.controller.projects.discovery import MODEL_FORMATS, find_models, is_model
from hil.controller.records.commands.projects import CreatedProject, ProjectFile
from hil.controller.storage.run_context import RunContext, open_context
from hil.core import own_version
from hil.core.boards import BOARDS_FOLDER, LoadedBoard, find_board, is_file, list_boards, read_board
from hil.core.config_files import parse_toml, read_trusted, trust
from hil.core.examples import find_examples_folder
from hil.core.files import copy_file, read_text, suggest_path
from hil.core.installed import is_from_index
from hil.core.storage_errors import convert_os_errors
from hil.errors import HilError, StorageError, UsageError, did_you_mean

CiKind = Literal["github", "gitlab", "none"]
EXAMPLE = "digits_cnn.onnx"
_MODELS = "models"
_EXPECTED = ".expected.npz"
_PYTEST = "pytest.ini"
# Files with settings of pytest, and the table that contains them. pytest.ini would override all of them.
_PYTEST_FILES = {
    "pytest.toml": "[pytest]",
    ".pytest.toml": "[pytest]",
    ".pytest.ini": "[pytest]",
    "pyproject.toml": "[tool.pytest",
    "tox.ini": "[pytest]",
    "setup.cfg": "[tool:pytest]",
}


@dataclass(frozen=True)
class ProjectRequest:
    """Choices for a new project.

    Attributes:
        model: path of a model; None copies an example. hil copies a model from outside of the directory.
        board: value of --board.
        package: requirement that CI installs; "" is this version of hil.
    """

    folder: Path
    model: Path | None
    board: str
    ci: CiKind
    package: str = ""


def check_folder(folder: Path) -> None:
    """Raise UsageError if a project cannot be created in the directory."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a directory", hint="specify a new directory or an existing directory")
    if (folder / FILE).exists() or (folder / FILE).is_symlink():
        raise UsageError(
            f"{folder} already is a project: {FILE} exists",
            hint=f"specify another directory; `hil config show` lists the values of {FILE}",
        )


def check_board(folder: Path, board: str) -> LoadedBoard | None:
    """Return the board's config, or None for an address or a host of the ssh config.

    Raises UsageError for an unknown board.
    """
    if is_address(board):
        return None
    own = folder / (board if is_file(board) else Path(BOARDS_FOLDER, f"{board}.toml"))
    if is_file(board) or (board not in list_boards() and own.is_file()):
        return read_board(own)
    return None if is_alias(board) else read_board(find_board(board, list_aliases))


def choose_default_model(folder: Path) -> Path | None:
    """Return the first model in the directory by format (ONNX, TFLite, MLIR) and name, or None."""
    found = find_models(folder)
    return folder / found[0] if found else None


def create_project(request: ProjectRequest) -> CreatedProject:
    """Create the missing files of a project. Existing files are not changed.

    Raises:
        UsageError: the directory is a project, or the model or board is invalid.
        StorageError: a file cannot be written.
    """
    folder = request.folder
    check_folder(folder)
    board = check_board(folder, request.board)
    if request.model is not None:
        check_model(request.model)
    repository = find_repository(folder)
    place = PurePosixPath(folder.resolve().relative_to(repository))
    _check_characters(place, request.model or EXAMPLE, request.board, request.package)
    with convert_os_errors(f"cannot create a project in {folder}", "specify a writable directory"):
        folder.mkdir(parents=True, exist_ok=True)
        files, model = _place_model(folder, request.model)
        format = MODEL_FORMATS[model.suffix.lower()]
        others = _list_tested_models(folder, model)
        package = request.package or _name_package([folder / model, *others])
        config = _name_config(folder, board) if board else ""
        is_simulator = board is not None and board.config.is_simulator
        dims, notes = _find_sizes([folder / model, *others])
        if config:
            notes.append(f"review {config}, then run in {folder}: hil board trust .")
        inputs, expected = (model.with_name(name) for name in _name_test_data(model.stem))
        if not format.has_reference and not (folder / expected).exists():
            notes.append(f"{model} has no independent reference: save tensors by name in {inputs} and {expected}")
        texts = templates.ProjectTexts(model, request.board, is_simulator, config, package, place, dims=dims)
        planned = {"tests/test_models.py": templates.write_tests(texts)}
        if found := _find_pytest_settings(folder):
            notes.append(_describe_pytest_setting(*found, texts.models))
        else:
            planned[_PYTEST] = templates.write_pytest_settings(texts)
        planned[".gitignore"] = templates.write_ignored()
        files += [_write_new(folder, name, text) for name, text in planned.items()]
        if request.ci != "none":
            # CI systems read only the files at the top of the repository.
            name, text = _plan_ci_file(request.ci, texts)
            file = _write_new(repository, name, text)
            files.append(file.replace(path=Path(os.path.relpath(repository / name, folder.resolve())).as_posix()))
            if file.state == "created" and not request.package and not is_from_index("hil"):
                notes.append(
                    f"hil was not installed from a package index: if CI cannot install {package!r}, change HIL_PACKAGE"
                    f" in {files[-1].path} (hil init --package)"
                )
        # The project file is last: if an error occurs before, the command can run again.
        files.append(_write_new(folder, FILE, templates.write_project(texts)))
    # Another process may have created the file in the meantime.
    if files[-1].state == "created":
        _trust_project(folder)
    return CreatedProject(
        folder=str(folder),
        model=str(model),
        board=request.board,
        ci=request.ci,
        files=files,
        notes=notes,
        next=_list_next(folder, model, [] if format.has_reference else ["--input", inputs, "--expected", expected]),
    )


def _name_config(folder: Path, board: LoadedBoard) -> str:
    """Return the path of a config that is in the project and needs trust, or ""."""
    path, root = board.path.resolve(), folder.resolve()
    return path.relative_to(root).as_posix() if board.config.asks and path.is_relative_to(root) else ""


def find_repository(folder: Path) -> Path:
    """Return the top of the git repository that contains a directory, or else the directory. Resolves links."""
    folder = folder.resolve()
    return next((one for one in (folder, *folder.parents) if (one / ".git").exists()), folder)


def _plan_ci_file(kind: CiKind, texts: templates.ProjectTexts) -> tuple[str, str]:
    """Return the path in the repository and the content of the CI file."""
    if kind == "gitlab":
        return ".gitlab-ci.yml", templates.write_gitlab(texts)
    name = "-".join(("models", *texts.place.parts))
    return f".github/workflows/{name}.yml", templates.write_github(texts)


def check_model(model: Path) -> None:
    """Raise UsageError if a file is missing or is not a model that hil supports here."""
    if not model.is_file():
        raise UsageError(
            f"model {model} not found",
            hint=f"{suggest_path(model)}specify a model file, or omit --model for an example",
        )
    if not is_model(model.name):
        hint = f"{did_you_mean(model.suffix, MODEL_FORMATS)}supported suffixes: {', '.join(MODEL_FORMATS)}"
        raise UsageError(f"unsupported model {model}", hint=hint)


def _is_valid_text(text: str) -> bool:
    """Return False for a text that the files of a project cannot contain: control characters, or invalid UTF-8."""
    return not any(unicodedata.category(one) in ("Cc", "Cs") for one in text)


def _check_characters(*values: object) -> None:
    """Raise UsageError for a text that the files of a project cannot contain."""
    for text in map(str, values):
        if not _is_valid_text(text):
            raise UsageError(
                f"unsupported characters in {text!r}: control characters or invalid UTF-8",
                hint="rename the file or directory, or specify another model with --model FILE",
            )


def _place_model(folder: Path, model: Path | None) -> tuple[list[ProjectFile], PurePosixPath]:
    """Copy the model to the project if it is outside. Return the copied files, and the model's path in the project."""
    source = model if model is not None else _find_example()
    root = folder.resolve()
    # Keep links inside of the project.
    place = source.parent.resolve() / source.name
    if place.is_relative_to(root):
        return [], PurePosixPath(place.relative_to(root))
    # External weights (x.onnx.data, x.onnx_data) and test data (x.inputs.npz) have the model's name.
    data = [
        one
        for one in sorted(source.parent.iterdir())
        if one != source
        and one.is_file()
        and (one.name.startswith(f"{source.name}") or one.name in _name_test_data(source.stem))
    ]
    (folder / _MODELS).mkdir(exist_ok=True)
    copied = [_copy_new(folder, PurePosixPath(_MODELS, one.name), one) for one in (source, *data)]
    return copied, PurePosixPath(_MODELS, source.name)


def _name_test_data(stem: str) -> tuple[str, ...]:
    return f"{stem}.inputs.npz", f"{stem}{_EXPECTED}"


def _list_tested_models(folder: Path, model: PurePosixPath) -> list[Path]:
    """Return the other models that pytest tests: those in the model's directory."""
    place = folder / model.parent
    return [place / path for path in find_models(place) if place / path != folder / model and _is_valid_text(path.name)]


def _find_sizes(models: Sequence[Path]) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return file name -> a size for every symbolic dimension, and notes.

    An invalid model is not an error here, because the user can replace the model later.
    """
    found: dict[str, dict[str, int]] = {}
    notes: list[str] = []
    with open_context(1) as context:
        for model in models:
            try:
                sizes = _suggest_model_sizes(model, context)
            except StorageError:
                raise
            except HilError as error:
                notes.append(f"{model.name}: {error.message}" + (f" ({error.hint})" if error.hint else ""))
                continue
            if sizes:  # models with the same file name share a table
                found[model.name] = {**sizes, **found.get(model.name, {})}
    texts = [", ".join(f"{dim}={size}" for dim, size in sizes.items()) for sizes in found.values()]
    if len(models) > 1:
        texts = [f"{name} {text}" for name, text in zip(found, texts, strict=True)]
    return found, [*notes, *([f"check the sizes of dimensions in {FILE}: {'; '.join(texts)}"] if texts else [])]


def _suggest_model_sizes(model: Path, context: RunContext) -> Mapping[str, int]:
    """Return a size for every symbolic dimension. Raises HilError if the model is invalid."""
    found = import_model(model, isolated=context.isolated, cache=context.cache)
    symbols = {dim for spec in found.inputs or () for dim in spec.shape if isinstance(dim, str)}
    return {**dict.fromkeys(sorted(symbols), 1), **suggest_sizes(found, context)} if symbols else {}


def _find_example() -> Path:
    return find_examples_folder() / EXAMPLE


def _copy_new(folder: Path, name: PurePosixPath, source: Path) -> ProjectFile:
    target = folder / name
    if target.exists() or target.is_symlink():
        return ProjectFile(path=str(name), state="kept")
    copy_file(source, target)
    return ProjectFile(path=str(name), state="created")


def _write_new(folder: Path, name: str, text: str) -> ProjectFile:
    """Write a file unless it exists."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return ProjectFile(path=name, state="kept")
    return ProjectFile(path=name, state="created")


def _find_pytest_settings(folder: Path) -> tuple[str, str] | None:
    """Return the file with pytest's settings, which pytest.ini would override, and the table; None without one."""
    for name, table in _PYTEST_FILES.items():
        path = folder / name
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError):
            continue
        if path.suffix == ".toml":
            data = parse_toml(text, path)
            tables = data.get("tool") if name == "pyproject.toml" else data
            own = tables.get("pytest") if isinstance(tables, dict) else None
            has_settings = own is not None
            if name == "pyproject.toml":
                is_ini = isinstance(own, dict) and "ini_options" in own
                table = "[tool.pytest.ini_options]" if is_ini else "[tool.pytest]"
        else:
            has_settings = table in text
        if has_settings:
            return name, table
    return None


def _describe_pytest_setting(name: str, table: str, models: str) -> str:
    """Return the note with the setting in the syntax of the file."""
    value = json.dumps([models], ensure_ascii=False) if name.endswith(".toml") else shlex.quote(models)
    return f"{name} has settings of pytest: add hil_models = {value} to {table}"


def _name_package(models: Sequence[Path]) -> str:
    """Return the requirement for this version of hil, with the extras for pytest and the models."""
    needed = sorted({MODEL_FORMATS[model.suffix.lower()].extra for model in models} - {""})
    extras = ",".join(["pytest", *needed])
    version = own_version()
    return f"hil[{extras}]" if "+" in version else f"hil[{extras}]=={version}"


def _trust_project(folder: Path) -> None:
    """Trust the new project file, because the user selected its board. Other trusted files stay trusted."""
    root = folder.resolve()
    project = read_project(root / FILE)
    if project.asks:
        known = {Path(path): digest for path, digest in read_trusted().get(str(root), {}).items()}
        trust(root, {**known, project.path: project.digest})


def _list_next(folder: Path, model: PurePosixPath, options: Sequence[str | PurePosixPath]) -> list[str]:
    found = [] if folder.resolve() == Path.cwd() else [shlex.join(["cd", str(folder)])]
    return [*found, shlex.join(["hil", "run", str(model), *map(str, options)]), "pytest"]
