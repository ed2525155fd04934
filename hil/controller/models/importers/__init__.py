"""Models as they come: read in a process of their own, described in one form."""

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
from hil.controller.storage.isolated import (
    Isolated,
    IsolatedFunction,
    function_name,
    function_version,
    lent,
    naming_errors,
)
from hil.controller.storage.own_code import ONNX_REWRITING, code_digest
from hil.controller.storage.packages import Registered, pick, registered
from hil.controller.storage.paths import is_file
from hil.core.digest import digest_file
from hil.core.field_types import check_fields
from hil.core.files import within
from hil.core.guarded import guard, guarded, package_of
from hil.core.named import later
from hil.core.results import Model
from hil.core.scratch import temporary_folder
from hil.core.tensors import DTYPES, TensorSpec, check_names
from hil.errors import ImportFailed, LoadFailed, NotRun, StageTimeout, UsageError

IMPORT_TIMEOUT_S = 600.0
# Raise this when what importing finds out changes: older results in the cache are then not used.
_VERSION = 10
_HEAD = 64
# What makes a folder a SavedModel of TensorFlow.
SAVED_MODEL = "saved_model.pb"


@dataclass(frozen=True)
class Importer:
    """How one format is read.

    ``describe(path, function, dims)`` is called in a process of its own with the file, the entry point ("": none is
    named) and the sizes of symbolic dimensions. It returns a JSON object of ``function``, ``inputs`` and ``outputs``
    (lists of [name, dtype, shape], or None where only the board can tell), ``ranges`` (input -> [low, high]),
    ``external`` (names of further files, relative to the model's folder) and ``producer`` (anything). Optional are
    ``float64`` (whether the model computes with float64; a missing value means that it may) and ``needs`` (further file
    -> [bytes that it must have, what needs them]). It raises ImportFailed, or UsageError for an entry point or a
    dimension that the model does not have.

    Attributes:
        recognises: whether a file that begins with these bytes is one, whatever its name.
        describe: the function, of a module, or its ``module:function``.
        reads: called with the path and the entry point: further files that the description is made of, which the
            model's own file does not hold.
    """

    suffixes: tuple[str, ...]
    recognises: Callable[[bytes], bool]
    describe: IsolatedFunction
    reads: Callable[[Path, str], Sequence[Path]] = lambda path, function: ()


def refuse_bundle(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Tell how a bundle is run, which is no model. Raises UsageError: always."""
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
        later(f"{_PROGRAMS}:read_with_program"),
    ),
    "so": Importer((".so",), has_no_mark, f"{_PROGRAMS}:describe_library", later(f"{_PROGRAMS}:read_with_library")),
    # Described so that whoever runs one as a model is told how it is run.
    "hilb": Importer((".hilb",), is_hilb, refuse_bundle),
    "pt2": Importer((".pt2",), has_no_mark, f"{_HERE}.pt2:describe"),
    # A SavedModel is a folder: its saved_model.pb is the model's file, its variables lie beside that. Other files are
    # GraphDefs.
    "tf": Importer(
        (".pb", ".pbtxt"),
        has_no_mark,
        f"{_TENSORFLOW}.source:describe",
        later(f"{_TENSORFLOW}.graph_def:companions"),
    ),
    "keras": Importer((".keras",), has_no_mark, f"{_TENSORFLOW}.source:describe"),
}


def importers() -> Registered[Importer]:
    """Every importer by format: the built-in ones and those of the entry point group ``hil.importers``."""
    return registered(_GROUP, _BUILT_IN, Importer, lambda one: function_name(one.describe))


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
        dims: values for symbolic dimensions of its inputs.
        format: ``onnx``, ``mlir``, ``vmfb``, ...; None goes by the file's name and first bytes.

    Raises:
        UsageError: no such file, not a model's name, no such function or dimension.
        ImportFailed: the file cannot be read as a model, or uses what hil cannot pass.
        StageTimeout: parsing took longer than ten minutes.
    """
    dims = dict(dims or {})
    name = path.stem
    if is_file(path / SAVED_MODEL):
        name, path = path.name, path / SAVED_MODEL
    _check_file(path)
    for symbol, size in dims.items():
        if size < 0:
            raise UsageError(f"--dim {symbol}={size}: a dimension cannot be negative")
    chosen = format or _format_of(path)
    importer = pick("model format", importers(), chosen)
    if path.stat().st_size == 0:
        raise ImportFailed(f"{path.name} is empty")
    with guard("importer", _GROUP, chosen, ImportFailed, ImportFailed, StageTimeout, NotRun, UsageError):
        model = _read(importer, name, chosen, path, function, dims, isolated, cache)
        if package_of(_GROUP, chosen):
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
    digest = digest_file(path)
    read = {file: _digest_of_read(file) for file in importer.reads(path, function)}
    found, cached = _describe(importer, path, digest, read, function, dims, isolated, cache)
    inputs, outputs = _specs(found["inputs"]), _specs(found["outputs"])
    try:
        check_names(inputs or (), outputs or ())
    except LoadFailed as error:
        raise ImportFailed(f"{path.name}: {error.message}", hint=error.hint) from error
    # A board is told the name, in UTF-8.
    main = path.name.encode(errors="replace").decode()
    files = {main: path} | {file: _external(path, file, found.get("needs", {}).get(file)) for file in found["external"]}
    others = {name: read.get(file) or digest_file(file) for name, file in files.items() if file != path}
    digests = {main: digest} | others
    return Model(
        name=name,
        format=chosen,
        path=path,
        files=files,
        # The main file may be called anything; the others the model itself calls by name.
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
    """Raise TypeError or ValueError for what an importer of a package may not say of a model."""
    check_fields(model)
    for spec in (*(model.inputs or ()), *(model.outputs or ())):
        if spec.dtype and spec.dtype not in DTYPES:
            raise ValueError(f"{spec.name} has the dtype {spec.dtype!r}, which hil does not know")
        if any(isinstance(dim, int) and dim < 0 for dim in spec.shape):
            raise ValueError(f"{spec.name} has the shape {spec.shape}: a dimension cannot be negative")
    # They read what the importer says of the producer.
    _ = model.unseen, model.random, model.random_outputs


def _digest_of_read(file: Path) -> str:
    """The digest of a further file; "" where it cannot be read: whether it is needed at all is found out later."""
    try:
        return digest_file(file)
    except (OSError, UsageError):
        return ""


def _check_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UsageError(
                f"{path} is a folder",
                hint=f"name the model's file; a folder that is a model itself, a SavedModel, holds {SAVED_MODEL}",
            )
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path} is no plain file", hint="name the model's file")
        with path.open("rb"):
            pass
    except FileNotFoundError as error:
        raise UsageError(f"no such file: {path}") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {error.strerror}") from error


def _format_of(path: Path) -> str:
    known = importers()
    for name, importer in known.items():
        if path.suffix.lower() in importer.suffixes:
            return name
    with path.open("rb") as file:
        head = file.read(_HEAD)
    for name, importer in known.items():
        if _recognises(importer, head):
            return name
    suffixes = sorted(suffix for importer in known.values() for suffix in importer.suffixes)
    raise UsageError(
        f"{path.name} is no kind of model that hil knows", hint=f"one of {', '.join(suffixes)}{known.broken_text()}"
    )


def _recognises(importer: Importer, head: bytes) -> bool:
    # A package's own may raise anything: other formats are none of its business.
    with contextlib.suppress(ImportFailed), guarded("recognising a file", ImportFailed):
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
    """What the importer says of the model, and whether the cache had it."""
    # What a SavedModel consists of is what lies in its folder: the main file does not name it.
    beside: Iterable[Path] = path.parent.rglob("*") if path.name == SAVED_MODEL else ()
    key = Cache.key(
        "import",
        digest=digest,
        beside=sorted(str(file.relative_to(path.parent)) for file in beside),
        read={file.name: own for file, own in read.items()},
        describe=function_version(importer.describe),
        suffix=path.suffix.lower(),
        function=function,
        dims=dict(dims),
        version=_VERSION,
        # The description of an ONNX model lists the rewrites that it needs.
        code=code_digest(*ONNX_REWRITING, "controller/models/random_nodes.py"),
    )

    def ask() -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            log = Path(stack.enter_context(temporary_folder("hil-import-"))) / "import.log"
            pool = stack.enter_context(lent(isolated, 1))
            arguments = {"path": str(path.absolute()), "function": function, "dims": dict(dims)}
            with naming_errors("import", f"reading {path.name}", ImportFailed, f"cannot read {path.name}"):
                found: dict[str, Any] = pool.call(importer.describe, arguments, timeout=IMPORT_TIMEOUT_S, log=log)
            return found

    return cache.get_or_compute(key, {"model": path.name}, ask) if cache is not None else (ask(), False)


def _specs(items: Sequence[Any] | None) -> tuple[TensorSpec, ...] | None:
    return None if items is None else tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in items)


def _external(model: Path, name: str, needs: Sequence[Any] | None) -> Path:
    """The path of a file that a model names: in the model's folder or below it, never elsewhere.

    Links count as ONNX Runtime counts them: they may also lead into the folder of the file that the model is a link to,
    as in the cache of the Hugging Face Hub (``snapshots/REVISION/model.onnx -> ../../blobs/HASH``).

    Args:
        needs: how many bytes it must have, and what needs them; None is unknown.
    """
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise ImportFailed(
            f"{model.name} keeps data in {name!r}, outside its own folder",
            hint="external data must lie beside the model or below it: save it again with a relative location",
        )
    file = model.parent / parts
    if not file.is_file():
        raise ImportFailed(
            f"{model.name} keeps data in {name!r}, which is missing", hint=f"put the file at {model.parent / parts}"
        )
    try:
        within(model.parent, file)
    except UsageError as error:
        if not file.resolve().is_relative_to(model.resolve().parent):
            raise ImportFailed(f"{model.name} keeps data in {name!r}: {error.message}", hint=error.hint) from error
    if needs is not None and (size := file.stat().st_size) < needs[0]:
        what = f"{needs[1]} is cut off: {name} has {size:,} of {needs[0]:,} bytes"
        raise ImportFailed(f"{model.name}: {what}", hint="copy the data file again")
    return file
