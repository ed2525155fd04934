"""Import models: read them in an isolated process and return a common description."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hil.controller.models.description import digest_of_files
from hil.controller.models.importers.heads import has_no_mark, is_bytecode, is_hilb, is_pte, is_tflite, is_vmfb
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import (
    Isolated,
    IsolatedFunction,
    convert_errors,
    get_function_name,
    lend_pool,
    make_function_version,
)
from hil.controller.storage.paths import is_file
from hil.controller.storage.sources.own_code import ONNX_REWRITING, digest_code
from hil.controller.storage.sources.packages import Registered, load_registered, pick
from hil.core.field_types import check_fields
from hil.core.files import digest_file, open_file, resolve_within, suggest_path
from hil.core.guarded import find_package, guard, guard_plugin
from hil.core.named import defer_import
from hil.core.results import Model
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import DTYPES, TensorSpec, check_names
from hil.errors import ImportFailed, LoadFailed, NotRun, StageTimeout, UsageError

IMPORT_TIMEOUT_SECONDS = 600.0
# Increment this when the format of the description changes, so that older cache entries are not used.
_VERSION = 10
_HEAD = 64
# Maximum file size, the same as for bundles.
_MAX_BYTES = 64 << 30
# File that identifies a TensorFlow SavedModel directory.
SAVED_MODEL = "saved_model.pb"


@dataclass(frozen=True)
class Importer:
    """Importer for one format.

    ``describe(path, function, dims)`` runs in an isolated process. It receives the file, the entry point ("" if not
    given) and the sizes for symbolic dimensions. It returns a JSON object with these keys:

    - ``function``: entry point name
    - ``inputs``, ``outputs``: lists of [name, dtype, shape], or None if only the board can find out
    - ``ranges``: input -> [low, high]
    - ``external``: further file names, relative to the model's directory
    - ``producer``: any value
    - ``float64`` (optional): whether the model computes with float64; if missing, it may
    - ``needs`` (optional): further file -> [required size in bytes, label for the data]

    It raises ImportFailed, or UsageError for an unknown entry point or dimension.

    Attributes:
        suffixes: file name suffixes of the format.
        recognises: called with the first bytes of a file; returns True if they identify the format, independent of the
            file name.
        describe: module-level function, or ``module:function``.
        reads: called with the path and the entry point; returns further files on which the description depends.
    """

    suffixes: tuple[str, ...]
    recognises: Callable[[bytes], bool]
    describe: IsolatedFunction
    reads: Callable[[Path, str], Sequence[Path]] = lambda path, function: ()


def refuse_bundle(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Raise UsageError for a bundle, which is not a model. The hint shows how to run the bundle."""
    name = Path(path).name
    raise UsageError(f"{name} is a bundle: a program with test cases", hint=f"hil bundle run {name}")


_GROUP = "hil.importers"
_HERE = "hil.controller.models.importers"
_PROGRAMS, _TENSORFLOW = f"{_HERE}.programs", "hil.controller.models.tensorflow"
_BUILT_IN = {
    "onnx": Importer((".onnx",), has_no_mark, f"{_HERE}.onnx:describe"),
    "mlir": Importer((".mlir", ".mlirbc", ".bc", ".stablehlo"), is_bytecode, f"{_HERE}.mlir:describe"),
    "vmfb": Importer((".vmfb",), is_vmfb, f"{_PROGRAMS}:describe_vmfb"),
    "tflite": Importer((".tflite",), is_tflite, f"{_PROGRAMS}:describe_tflite"),
    "pte": Importer(
        (".pte", ".bpte"),
        is_pte,
        f"{_PROGRAMS}:describe_pte",
        defer_import(f"{_PROGRAMS}:read_with_program"),
    ),
    "so": Importer(
        (".so",), has_no_mark, f"{_PROGRAMS}:describe_library", defer_import(f"{_PROGRAMS}:read_with_library")
    ),
    # A bundle is not a model. The entry provides an error with a hint.
    "hilb": Importer((".hilb",), is_hilb, refuse_bundle),
    "pt2": Importer((".pt2",), has_no_mark, f"{_HERE}.exported.pt2:describe"),
    # A SavedModel is a directory with saved_model.pb and the variables. Other files are GraphDefs.
    "tf": Importer(
        (".pb", ".pbtxt"),
        has_no_mark,
        f"{_TENSORFLOW}.source:describe",
        defer_import(f"{_TENSORFLOW}.graph_def:list_companions"),
    ),
    "keras": Importer((".keras",), has_no_mark, f"{_TENSORFLOW}.source:describe"),
}


def load_importers() -> Registered[Importer]:
    """Return all importers by format: built-in importers and plugins from the entry point group ``hil.importers``."""
    return load_registered(_GROUP, _BUILT_IN, Importer, lambda one: get_function_name(one.describe))


def import_model(
    path: Path,
    *,
    function: str = "",
    dims: Mapping[str, int] | None = None,
    format: str | None = None,
    isolated: Isolated | None = None,
    cache: Cache | None = None,
) -> Model:
    """Read a model's entry point, inputs and outputs.

    Args:
        path: the model's file, or a SavedModel directory.
        function: entry point; "" selects the default.
        dims: sizes of symbolic input dimensions.
        format: ``onnx``, ``mlir``, ``vmfb``, ...; None detects it from the file's name and first bytes.
        isolated: isolated process pool; None creates one.
        cache: description cache; None disables it.

    Raises:
        UsageError: the file, function or dimension does not exist, or the format is unknown.
        ImportFailed: the file is not a valid model, or uses features that hil does not support.
        StageTimeout: parsing took longer than ten minutes.
    """
    dims = dict(dims or {})
    name = path.stem
    if is_file(path / SAVED_MODEL):
        name, path = path.name, path / SAVED_MODEL
    _check_file(path)
    for symbol, size in dims.items():
        if size < 0:
            raise UsageError(f"invalid --dim {symbol}={size}: a dimension cannot be negative")
    chosen = format or _format_of(path)
    importer = pick("model format", load_importers(), chosen)
    if path.stat().st_size == 0:
        raise ImportFailed(f"{path.name} is empty")
    with guard("importer", _GROUP, chosen, ImportFailed, ImportFailed, StageTimeout, NotRun, UsageError):
        model = _read(importer, name, chosen, path, function, dims, isolated, cache)
        if find_package(_GROUP, chosen):
            _check_model(model)
    return model


def _read(
    importer: Importer,
    name: str,
    chosen: str,
    path: Path,
    function: str,
    dims: Mapping[str, int],
    isolated: Isolated | None,
    cache: Cache | None,
) -> Model:
    digest = _digest_of(path)
    read = {file: _digest_of_read(file) for file in importer.reads(path, function)}
    found, cached = _describe(importer, path, digest, read, function, dims, isolated, cache)
    inputs, outputs = _make_specs(found["inputs"]), _make_specs(found["outputs"])
    try:
        check_names(inputs or (), outputs or ())
    except LoadFailed as error:
        raise ImportFailed(f"{path.name}: {error.message}", hint=error.hint) from error
    # Boards receive the name in UTF-8, so replace other characters.
    main = path.name.encode(errors="replace").decode()
    files = {main: path} | {
        file: _resolve_external(path, file, found.get("needs", {}).get(file)) for file in found["external"]
    }
    others = {name: read.get(file) or _digest_of(file) for name, file in files.items() if file != path}
    digests = {main: digest} | others
    return Model(
        name=name,
        format=chosen,
        path=path,
        files=files,
        # The digest ignores the name of the main file. Other names count, because the model refers to these files by
        # name.
        digest=digest_of_files({name if name != main else "": one for name, one in digests.items()}),
        function=found["function"],
        inputs=inputs,
        outputs=outputs,
        ranges={name: (low, high) for name, (low, high) in found["ranges"].items()},
        dims=dims,
        has_float64=found.get("float64", True),
        producer=found["producer"],
        cached=cached,
    )


def _check_model(model: Model) -> None:
    """Raise TypeError or ValueError if a plugin's importer returned an invalid description."""
    check_fields(model)
    for spec in (*(model.inputs or ()), *(model.outputs or ())):
        if spec.dtype and spec.dtype not in DTYPES:
            raise ValueError(f"unsupported dtype {spec.dtype!r} of {spec.name}")
        if any(isinstance(dim, int) and dim < 0 for dim in spec.shape):
            raise ValueError(f"invalid shape {spec.shape} of {spec.name}: a dimension cannot be negative")
    # These properties validate the producer's fields.
    _ = model.unseen, model.random, model.random_outputs


def _digest_of_read(file: Path) -> str:
    """Return the digest for a further file, or "" if the file is unreadable.

    A later step reports missing files.
    """
    try:
        return _digest_of(file)
    except (OSError, UsageError):
        return ""


def _digest_of(file: Path) -> str:
    size = file.stat().st_size
    if size > _MAX_BYTES:  # sparse files may have any size
        raise UsageError(
            f"{file} has {size} bytes: the limit is {_MAX_BYTES}", hint="split the weights into smaller files"
        )
    return digest_file(file)


def _check_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UsageError(
                f"{path} is a directory",
                hint=f"pass the model file, or a SavedModel directory with {SAVED_MODEL}",
            )
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path} is not a regular file", hint="pass the model file")
        with open_file(path):
            pass
    except FileNotFoundError as error:
        raise UsageError(f"no such file: {path}", hint=suggest_path(path).rstrip()) from error
    except OSError as error:
        raise UsageError(f"cannot open {path}: {error.strerror}") from error


def _format_of(path: Path) -> str:
    known = load_importers()
    for name, importer in known.items():
        if path.suffix.lower() in importer.suffixes:
            return name
    with open_file(path) as file:
        head = file.read(_HEAD)
    for name, importer in known.items():
        if _recognises(importer, head):
            return name
    suffixes = sorted(suffix for importer in known.values() for suffix in importer.suffixes)
    raise UsageError(
        f"unsupported model format: {path.name}",
        hint=f"supported suffixes: {', '.join(suffixes)}{known.format_broken()}",
    )


def _recognises(importer: Importer, head: bytes) -> bool:
    # A plugin's function may raise any exception. The exception must not affect other formats.
    with contextlib.suppress(ImportFailed), guard_plugin("recognising a file", ImportFailed):
        return bool(importer.recognises(head))
    return False


def _describe(
    importer: Importer,
    path: Path,
    digest: str,
    read: Mapping[Path, str],
    function: str,
    dims: Mapping[str, int],
    isolated: Isolated | None,
    cache: Cache | None,
) -> tuple[dict[str, Any], bool]:
    """Return the importer's description of the model, and True if the description came from the cache."""
    # A SavedModel consists of all files in its directory, which the main file does not list.
    beside: Iterable[Path] = path.parent.rglob("*") if path.name == SAVED_MODEL else ()
    key = Cache.key(
        "import",
        digest=digest,
        beside=sorted(str(file.relative_to(path.parent)) for file in beside),
        read={file.name: own for file, own in read.items()},
        describe=make_function_version(importer.describe),
        suffix=path.suffix.lower(),
        function=function,
        dims=dict(dims),
        version=_VERSION,
        # An ONNX description lists the required rewrites, so the key includes the code of the rewrites.
        code=digest_code(*ONNX_REWRITING, "controller/models/onnx_files/random_nodes.py"),
    )

    def ask() -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            log = Path(stack.enter_context(make_temporary_folder("hil-import-"))) / "import.log"
            pool = stack.enter_context(lend_pool(isolated, 1))
            arguments = {"path": str(path.absolute()), "function": function, "dims": dict(dims)}
            with convert_errors("import", f"reading {path.name}", ImportFailed, f"cannot read {path.name}"):
                found: dict[str, Any] = pool.call(importer.describe, arguments, timeout=IMPORT_TIMEOUT_SECONDS, log=log)
            return found

    return cache.get_or_compute(key, {"model": path.name}, ask) if cache is not None else (ask(), False)


def _make_specs(items: Sequence[Any] | None) -> tuple[TensorSpec, ...] | None:
    return None if items is None else tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in items)


def _resolve_external(model: Path, name: str, needs: Sequence[Any] | None) -> Path:
    """Return the path of an external data file, which must be in the model's directory or below it.

    Symbolic links follow ONNX Runtime's rules. If the model itself is a link, links to the directory of its target are
    also allowed. An example is the Hugging Face Hub cache: ``snapshots/REVISION/model.onnx -> ../../blobs/HASH``.

    Args:
        model: the model's file.
        name: file name from the model.
        needs: required size in bytes, and label for the data; None if unknown.
    """
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise ImportFailed(
            f"external data {name!r} of {model.name} is outside the model's directory",
            hint="save the model again with a relative data location in the same directory or a subdirectory",
        )
    file = model.parent / parts
    if not is_file(file):
        raise ImportFailed(
            f"external data {name!r} of {model.name} is missing", hint=f"copy the file to {model.parent / parts}"
        )
    try:
        resolve_within(model.parent, file)
    except UsageError as error:
        if not file.resolve().is_relative_to(model.resolve().parent):
            raise ImportFailed(f"external data {name!r} of {model.name}: {error.message}", hint=error.hint) from error
    if needs is not None and (size := file.stat().st_size) < needs[0]:
        what = f"{needs[1]} is truncated: {name} has {size:,} of {needs[0]:,} bytes"
        raise ImportFailed(f"{model.name}: {what}", hint="copy the data file again")
    return file
