"""Archives of ``torch.export.save``, opened without running what may be hidden in them.

``torch.export.load`` trusts its file: it unpickles weights, constants and example inputs that say they are pickles,
loads shared libraries, evaluates shape expressions and guards as Python, imports modules that a pytree names, and
resolves an operator's name to anything below ``torch``. Each of those is looked at here and in
:mod:`hil.controller.models.importers.pt2_graph` before torch sees the archive: what torch writes of an ordinary model
passes, anything else is refused.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hil.controller.models.importers.pt2_graph import AGAIN, check_graph, read_json
from hil.controller.storage.texts import first_line
from hil.errors import ImportFailed, UsageError

_MODEL = "models/model.json"
_CONFIGS = {
    "weights": ("data/weights/", "data/weights/model_weights_config.json"),
    "constants": ("data/constants/", "data/constants/model_constants_config.json"),
}
# Programs beside the model, shared libraries among them, and weights as older releases pickled them.
_FORBIDDEN = re.compile(r"data/(aotinductor|executorch)/|data/(weights|constants)/.*\.pt$")


def load_program(path: str) -> Any:
    """The ``torch.export.ExportedProgram`` that a file holds. For isolated processes: it imports torch.

    Args:
        path: what ``torch.export.save`` wrote.

    Raises:
        ImportFailed: it is no such archive, is damaged, was written for another torch, or holds what only running code
            from the file could read.
    """
    name = Path(path).name
    try:
        import torch
    except ModuleNotFoundError as error:
        raise UsageError(
            f"reading {name} takes PyTorch, which is not installed here", hint="pip install 'hil[torch]'"
        ) from error
    _check(path)
    with _weights_only(), _torch_trouble() as trouble:
        try:
            program = torch.export.load(path)
        except Exception as error:  # torch has no error of its own for a bad file
            cause = trouble[0] if trouble else error
            raise ImportFailed(
                f"{name} cannot be read by torch {torch.__version__}: {first_line(cause)}", hint=AGAIN
            ) from error
    # Checks of inputs, as Python text from the file. hil checks inputs itself.
    program._guards_code = []
    _drop_derived_ranges(program)
    return program


def _drop_derived_ranges(program: Any) -> None:
    """Sizes such as ``16*s0`` have ranges of their own in the file; torch, decomposing, takes all for symbols."""
    import sympy
    from torch._subclasses.fake_tensor import FakeTensor

    values = [node.meta.get("val") for node in program.graph.nodes]
    shapes = [value.fake_mode.shape_env for value in values if isinstance(value, FakeTensor)]
    for ranges in (shape.var_to_range for shape in shapes if shape is not None):
        for size in [size for size in ranges if not isinstance(size, sympy.Symbol)]:
            del ranges[size]


def _check(path: str) -> None:
    """Refuse an archive that would make torch do more than read tensors and build a graph."""
    from torch.export.pt2_archive import PT2ArchiveReader

    name = Path(path).name
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ImportFailed(
            f"{name} is no archive of torch.export.save, or is cut off or damaged", detail=str(error)
        ) from error
    listed = [entry.filename for entry in entries]
    if "serialized_exported_program.json" in listed:
        raise ImportFailed(f"{name} is in the format of torch 2.7 or older", hint=AGAIN)
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or len(set(listed)) != len(listed):
        raise ImportFailed(f"{name} was not written by torch.export.save: it has compressed or repeated entries")
    try:
        reader = PT2ArchiveReader(path)
        records = reader.get_file_names()
    except (RuntimeError, AssertionError, UnicodeDecodeError) as error:
        raise ImportFailed(f"{name} is no archive of torch.export.save, or is damaged", detail=str(error)) from error
    # Two readers must see the same entries: otherwise what is checked here is not what torch loads.
    root = listed[0].partition("/")[0] if listed else ""
    if sorted(f"{root}/{record}" for record in records) != sorted(listed):
        raise ImportFailed(f"{name} was not written by torch.export.save: its entries are ambiguous")
    models = [record for record in records if record.startswith("models/")]
    if models != [_MODEL]:
        raise ImportFailed(f"{name} holds {len(models)} programs, not the one that torch.export.save writes")
    if hidden := [record for record in records if _FORBIDDEN.match(record)]:
        raise ImportFailed(
            f"{name} holds {hidden[0]}, compiled code or a pickle: hil takes exported programs with plain weights",
            hint=AGAIN,
        )
    sizes = {record: int(reader.archive_file.get_record_size(record)) for record in records}
    check_graph(name, read_json(name, reader.read_bytes(_MODEL)))
    for kind, (folder, config) in _CONFIGS.items():
        if config in sizes:
            try:
                _check_payload(name, kind, folder, read_json(name, reader.read_bytes(config)), sizes)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ImportFailed(f"{name} is damaged: {config} is not what torch writes") from error


def _check_payload(name: str, kind: str, folder: str, config: Any, sizes: dict[str, int]) -> None:
    """Tensors must lie in the archive as plain bytes; torch itself checks that each lies within its record."""
    for key, payload in config["config"].items():
        record = folder + payload["path_name"]
        if payload["path_name"].startswith(("custom_obj_", "opaque_obj_")):
            raise ImportFailed(
                f"{name} keeps {key!r} as a pickled object, which hil does not unpickle",
                hint="export a module whose constants are tensors and numbers",
            )
        if record not in sizes:
            raise ImportFailed(f"{name} is damaged: {kind} lack {record}")
        meta = payload.get("tensor_meta") or {"sizes": []}
        elements = math.prod(int(size["as_int"]) for size in meta["sizes"])
        if not payload["use_pickle"] and elements and not sizes[record]:
            raise ImportFailed(f"{name} is damaged: {key!r} has {elements} elements and no data")


@contextlib.contextmanager
def _weights_only() -> Iterator[None]:
    """Whatever torch unpickles meanwhile, such as example inputs, may name tensors and plain containers alone."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _torch_trouble() -> Iterator[list[BaseException]]:
    """The errors that torch.export.load logs and then hides behind one of its own."""
    found: list[BaseException] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                found.append(record.exc_info[1])

    handler = Keep()
    logger = logging.getLogger("torch.export")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
