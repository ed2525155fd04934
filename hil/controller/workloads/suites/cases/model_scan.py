"""Find the models in a path, with their accompanying files and test cases."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hil.bundles import Bundle, Method
from hil.bundles.cases import BundledCase
from hil.bundles.signature import add_seal
from hil.controller.models.generation.spec import GENERATE, read_file_names
from hil.controller.models.importers import load_importers
from hil.controller.models.inputs import CALIBRATION
from hil.controller.models.tensorflow import graph_def
from hil.controller.pipeline.settings import given_inputs
from hil.controller.pipeline.settings.flagfiles import parse_flagfile
from hil.controller.storage.paths import path_exists
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.tensor_files import load_npz
from hil.controller.workloads.bundles.bpte import read_bpte
from hil.controller.workloads.bundles.case_files import GOLDEN_INDEX, read_golden
from hil.controller.workloads.bundles.flagfile import (
    is_flagfile,
    list_flagfiles,
    list_omitted_calls,
    make_case_name,
    read_flagfiles,
)
from hil.controller.workloads.bundles.methods import read_random_record
from hil.controller.workloads.bundles.onnx import find_model, list_data_sets, list_omitted_data_sets
from hil.controller.workloads.bundles.program_case import ProgramCase, extract_program, open_bundle
from hil.controller.workloads.suites.cases.spec import OwnCase, SuiteModel, replace_forbidden
from hil.core.digest import digest_of
from hil.core.files import MAX_TEXT_BYTES, digest_file, read_file
from hil.core.tensors import Array
from hil.core.text import make_names_unique
from hil.errors import UsageError
from hil.formats.executorch_file import Damaged, is_bundle, read_buffer, read_cases, read_methods

_INPUTS = given_inputs.SUFFIX
_EXPECTED = ".expected.npz"
# A TensorFlow SavedModel is a directory with this file.
_SAVED_MODEL = "saved_model.pb"
# A directory with any such file is a model with the directory's name.
_FOLDERS = (_SAVED_MODEL, GOLDEN_INDEX)
# A directory with any such file is a hil run, which contains copies of models.
_RUNS = ("suite.json", "run.json")


@dataclass(frozen=True)
class ModelScan:
    """Models and skipped test cases of a path."""

    models: list[SuiteModel]
    left_out: list[str]  # test cases that cannot be run, one line per place


def scan_models(path: Path) -> ModelScan:
    """Return the models in a directory tree by path, or the model in a file.

    A model has the name of the file. A SavedModel or an exported golden directory has the directory's name. If names
    collide, the relative path becomes the name (``a.net`` and ``b.net`` for ``a/net.onnx`` and ``b/net.onnx``). If the
    relative paths collide too, the name includes the suffix.

    Test cases in a model's directory belong to the model: directories ``test_data_set_N`` for an ONNX model, and flag
    files for an IREE program. If the program is in another directory, the first flag file stands for the model.

    Raises:
        UsageError: the file is not a model, or the directory is unreadable.
    """
    if path.is_dir():
        root, files = path, sorted(_walk_files(path))
        flagged, left_out = group_by_program(list_flagfiles(files))
        sets = {file.parent.parent for file in files if file.parent.name.startswith("test_data_set")}
        left_out += [
            *list_omitted_calls(files),
            *(line for one in sorted(sets) for line in list_omitted_data_sets(one)),
        ]
    else:
        root, files, left_out = path.parent, [path], []
        flagged, _ = group_by_program([path] if is_flagfile(path.name) else list_flagfiles(root.iterdir()))
        if not is_flagfile(path.name):
            flagged = {program: its for program, its in flagged.items() if program == path.resolve()}
        if not flagged and not _is_model(path, _list_suffixes(), True):
            hint = f"supported suffixes: {', '.join(_list_suffixes())}"
            raise UsageError(f"unsupported model format: {path.name}", hint=hint)
    suffixes = _list_suffixes()
    own = {file: flagged.pop(file.resolve(), []) for file in files if _is_model(file, suffixes, not path.is_dir())}
    elsewhere = {its[0]: program.name for program, its in flagged.items()}
    own |= {its[0]: its for its in flagged.values()}
    ordered = sorted(own)
    called = [_get_naming_path(file.relative_to(root)) for file in ordered]
    called = [one.with_name(elsewhere.get(file, one.name)) for file, one in zip(ordered, called, strict=True)]
    models = [_create_model(name, file, own[file]) for name, file in zip(_choose_names(called), ordered, strict=True)]
    return ModelScan(models, left_out)


def _walk_files(folder: Path) -> Iterator[Path]:
    """Yield the files in a directory tree. Skip hidden files, package managers' directories, and hil runs."""

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error

    for place, below, names in os.walk(folder, onerror=refuse):
        if any(name in names for name in _RUNS):
            below.clear()
            continue
        if GOLDEN_INDEX in names and is_golden(Path(place, GOLDEN_INDEX)):
            below.clear()
            yield Path(place, GOLDEN_INDEX)
            continue
        below[:] = [name for name in below if not name.startswith(".") and not _is_foreign(Path(place, name))]
        yield from (Path(place, name) for name in names if not name.startswith("."))


def _is_foreign(folder: Path) -> bool:
    """Return whether a package manager created a directory. Virtual environments contain unrelated models."""
    return folder.name in ("__pycache__", "node_modules") or (folder / "pyvenv.cfg").exists()


def _list_suffixes() -> tuple[str, ...]:
    return tuple(sorted(suffix for one in load_importers().values() for suffix in one.suffixes))


def _is_model(file: Path, suffixes: tuple[str, ...], named: bool) -> bool:
    """Return whether a file is a model.

    Libraries must be named by the user; TensorFlow graphs must be named or have a config.
    """
    if file.name in _FOLDERS:
        return file.name == _SAVED_MODEL or is_golden(file)
    name = file.name.lower()
    if name.endswith(graph_def.SUFFIXES):
        return graph_def.is_graph(file) and (named or graph_def.own_config(file) is not None)
    return name.endswith(suffixes) and (named or not name.endswith(".so"))


def _choose_names(files: list[Path]) -> list[str]:
    """Return a unique name per file: the shortest of stem, path and path with suffix."""
    forms = [[replace_forbidden(part) for part in (own.stem, str(own.with_suffix("")), str(own))] for own in files]
    names = [form[0] for form in forms]
    for longer in (1, 2):
        count = Counter(names)
        names = [form[longer] if count[name] > 1 else name for name, form in zip(names, forms, strict=True)]
    return make_names_unique(names)


def _get_naming_path(file: Path) -> Path:
    """Return the path that names a model: the model's file, or the directory of a SavedModel or golden directory."""
    return file.parent if file.name in _FOLDERS and file.parent.name else file


def _create_model(name: str, file: Path, flagfiles: Sequence[Path]) -> SuiteModel:
    called = _get_naming_path(file)
    beside = [called.with_name(called.stem + kind) for kind in (_INPUTS, _EXPECTED, CALIBRATION)]
    inputs, expected, _ = beside
    model = SuiteModel(
        name, file, given=functools.partial(_read_archive, inputs), expected=functools.partial(_read_archive, expected)
    )
    is_case = path_exists(inputs) or path_exists(expected)
    if flagfiles:
        beside += [one for flagfile in flagfiles for one in _list_source_files(flagfile) if one != file]
        own_cases = functools.partial(make_flagfile_cases, flagfiles, file.parent)
        model = replace(model, own_cases=own_cases, is_case=is_case)
    elif may_contain_cases(file):
        if is_golden(file):
            beside += [one for one in sorted(file.parent.rglob("*")) if one.is_file() and one != file]
        model = replace(model, own_cases=functools.partial(read_own_cases, file), is_case=is_case)
    elif file.suffix.lower() == ".onnx" and find_model(file.parent) == file:
        model = replace(model, data_sets=tuple(list_data_sets(file.parent)))
        beside += [one for place in model.data_sets for one in sorted(place.iterdir())]
    spec = called.with_name(called.stem + GENERATE)
    if path_exists(spec):
        beside += [spec, *_list_named_files(spec)]
        model = replace(model, generate=spec)
    return replace(model, beside=tuple(dict.fromkeys(beside)))


def _list_named_files(spec: Path) -> list[Path]:
    try:
        reference, others = read_file_names(spec)
        return [spec.parent / name for name in (reference, *others) if name]
    except UsageError:  # the case reports the error
        return []


def _list_source_files(flagfile: Path) -> list[Path]:
    try:
        return list_files(flagfile)
    except UsageError:  # the case reports the error
        return [flagfile]


def _read_archive(archive: Path) -> Mapping[str, Array]:
    """Read the arrays of a model, such as ``net.inputs.npz`` for ``net.onnx`` or the SavedModel ``net``."""
    return load_npz(archive) if path_exists(archive) else {}


def may_contain_cases(file: Path) -> bool:
    """Return whether a file's name allows bundled cases: a bundle, or a golden directory's index."""
    return file.suffix.lower() in (".hilb", ".bpte") or is_golden(file)


def is_golden(file: Path) -> bool:
    """Return whether a file is a golden directory's index, which ``hil bundle export --to golden`` writes."""
    return file.name == GOLDEN_INDEX and (file.parent / "program").is_dir()


def read_own_cases(file: Path, context: RunContext) -> list[OwnCase]:
    """Return all methods' cases in a file for which :func:`may_contain_cases` is true.

    A ``.bpte`` may have no cases.
    """
    if is_golden(file):
        bundle = read_golden(file.parent, context=context)
    elif file.suffix.lower() == ".hilb":
        bundle = open_bundle(file)
    elif _has_cases(file):
        bundle = read_bpte(file, context=context)
    else:
        return []
    return list(_list_bundled_cases(file, bundle, context))


def make_flagfile_cases(files: Sequence[Path], folder: Path, context: RunContext) -> list[OwnCase]:
    """Return a case per flag file of a program. Names are relative to a directory."""

    def make(file: Path, place: Path) -> ProgramCase:
        (own,) = _list_bundled_cases(file, read_flagfiles(file, context=context), context)
        return own.make(place)

    return [
        OwnCase(make_case_name(file, folder), _digest_sources(file), functools.partial(make, file)) for file in files
    ]


def group_by_program(flagfiles: Sequence[Path]) -> tuple[dict[Path, list[Path]], list[str]]:
    """Group flag files by program. Also return a line about flag files without expected outputs, which are skipped.

    Files that name no program are ignored, because IREE's tools did not write them. A file that hil cannot parse forms
    a separate group, whose case reports the error.
    """
    programs: dict[Path, list[Path]] = {}
    silent = []
    for file in flagfiles:
        try:
            text = read_file(file, MAX_TEXT_BYTES).decode(errors="replace")
            if "--module=" not in text:
                continue
            if "--expected_output=" not in text:
                silent.append(file)
                continue
            program = parse_flagfile(file).modules[0].resolve()
        except (OSError, ValueError, UsageError):  # a zero byte in a name
            program = file
        programs.setdefault(program, []).append(file)
    more = f" and {len(silent) - 1} more flag files" if len(silent) > 1 else ""
    left_out = [f"{silent[0]}{more}: missing --expected_output"] if silent else []
    return programs, left_out


def list_files(flagfile: Path) -> list[Path]:
    """Return the flag file and all files that it names."""
    flags = parse_flagfile(flagfile)
    tensors = [text.partition("@")[2] for text in (*flags.inputs, *flags.expected)]
    return [flagfile, *flags.modules, *flags.parameters, *(Path(name) for name in tensors if name)]


def _list_bundled_cases(file: Path, bundle: Bundle, context: RunContext) -> Iterator[OwnCase]:
    def make(method: Method, case: BundledCase, place: Path) -> ProgramCase:
        program = add_seal(extract_program(bundle, context.cache), bundle.head, place)
        random = read_random_record(bundle.made, method.name)
        return ProgramCase(file, bundle.digest, method, case, program, random)

    for method in bundle.methods:
        for case in method.cases:
            yield OwnCase(f"{method.name}_{case.name}", bundle.digest, functools.partial(make, method, case))


def _digest_sources(flagfile: Path) -> str:
    try:
        return digest_of("\n".join(digest_file(file) for file in list_files(flagfile)).encode())
    except (OSError, UsageError):
        return ""


def _has_cases(file: Path) -> bool:
    try:
        data = read_buffer(file)
        # If the program is damaged, the case must report that.
        return is_bundle(data) and bool(read_methods(data)) and any(read_cases(data).values())
    except (OSError, Damaged) as error:
        raise UsageError(f"{file.name} cannot be read: {error}") from error
