"""Open ``torch.export.save`` archives without running embedded code.

``torch.export.load`` trusts the file:

- It unpickles weights, constants and example inputs that are marked as pickles.
- It loads shared libraries.
- It evaluates shape expressions and guards as Python.
- It imports modules that a pytree names.
- It resolves an operator name to an arbitrary object below ``torch``.

This module checks all of this before torch reads the archive. It accepts the content that torch writes for an ordinary
model, and rejects everything else.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import operator
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hil.controller.models.importers.exported.pt2_sizes import check_size
from hil.controller.storage.screen.texts import get_first_line, import_hint
from hil.core.bounded_json import MAX_RECORD_VALUES, parse_json
from hil.core.files import open_file
from hil.core.install_hints import make_install_command
from hil.errors import ImportFailed, UsageError

_MODEL = "models/model.json"
_CONFIGS = {kind: f"data/{kind}/model_{kind}_config.json" for kind in ("weights", "constants")}
# Entries to reject: compiled programs next to the model, including shared libraries, and pickled weights of older
# releases.
_FORBIDDEN = re.compile(r"data/(aotinductor|executorch)/|data/(weights|constants)/.*\.pt$")


def load_program(path: str) -> Any:
    """Load a ``torch.export.ExportedProgram`` from a file. Call this only in an isolated process: it imports torch.

    Raises:
        ImportFailed: the file is damaged, requires a different version of torch, or contains code that torch would run.
    """
    name = Path(path).name
    try:
        import torch
    except ModuleNotFoundError as error:
        raise UsageError(
            f"reading {name} requires PyTorch, which is not installed", hint=make_install_command("torch")
        ) from error
    _check(path)
    with _restrict_unpickling(), _collect_torch_errors() as trouble:
        try:
            program = torch.export.load(path)
        except Exception as error:  # torch does not define an exception for invalid files
            cause = trouble[0] if trouble else error
            raise ImportFailed(
                f"torch {torch.__version__} cannot read {name}: {get_first_line(cause)}", hint=AGAIN
            ) from error
    # The file contains Python source for input checks. Remove it, because hil checks inputs itself.
    program._guards_code = []
    _drop_derived_ranges(program)
    return program


def _drop_derived_ranges(program: Any) -> None:
    """Remove ranges of derived sizes such as ``16*s0``. During decomposition, torch would treat them as symbols."""
    import sympy
    from torch._subclasses.fake_tensor import FakeTensor

    values = [node.meta.get("val") for node in program.graph.nodes]
    shapes = [value.fake_mode.shape_env for value in values if isinstance(value, FakeTensor)]
    for ranges in (shape.var_to_range for shape in shapes if shape is not None):
        for size in [size for size in ranges if not isinstance(size, sympy.Symbol)]:
            del ranges[size]


def _check(path: str) -> None:
    """Reject an archive that would make torch do more than read tensors and build a graph."""
    from torch.export.pt2_archive import PT2ArchiveReader

    name = Path(path).name
    try:
        with open_file(Path(path)) as file, zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, EOFError) as error:
        raise ImportFailed(
            f"{name} is not a torch.export.save archive, or is truncated or damaged", detail=str(error)
        ) from error
    listed = [entry.filename for entry in entries]
    if "serialized_exported_program.json" in listed:
        raise ImportFailed(f"{name} has the unsupported format of torch 2.7 or older", hint=AGAIN)
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or len(set(listed)) != len(listed):
        raise ImportFailed(f"{name} was not written by torch.export.save: compressed or repeated entries")
    try:
        reader = PT2ArchiveReader(path)
        records = reader.get_file_names()
        sizes = {record: int(reader.archive_file.get_record_size(record)) for record in records}
        parts = (_MODEL, *_CONFIGS.values())
        texts = {record: reader.read_bytes(record) for record in parts if record in sizes}
    except (RuntimeError, AssertionError, UnicodeDecodeError) as error:
        raise ImportFailed(f"{name} is not a torch.export.save archive, or is damaged", detail=str(error)) from error
    # This reader and torch's reader must see the same entries. Otherwise torch could load unchecked content.
    root = listed[0].partition("/")[0] if listed else ""
    if sorted(f"{root}/{record}" for record in records) != sorted(listed):
        raise ImportFailed(f"{name} was not written by torch.export.save: zip readers find different entries")
    models = [record for record in records if record.startswith("models/")]
    if models != [_MODEL]:
        raise ImportFailed(f"{name} has {len(models)} programs: expected one")
    if hidden := [record for record in records if _FORBIDDEN.match(record)]:
        raise ImportFailed(
            f"unsupported compiled code or pickle {hidden[0]} in {name}: expected only plain weights",
            hint=AGAIN,
        )
    _Checker(name).check(read_json(name, texts[_MODEL]))
    for kind, config in _CONFIGS.items():
        if config in texts:
            try:
                _check_payload(name, kind, read_json(name, texts[config]), sizes)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ImportFailed(f"{name} is damaged: invalid {config}") from error


def _check_payload(name: str, kind: str, config: Any, sizes: dict[str, int]) -> None:
    """Check that tensors are stored as plain bytes. torch itself checks that each tensor is inside its record."""
    for key, payload in config["config"].items():
        record = f"data/{kind}/{payload['path_name']}"
        if payload["path_name"].startswith(("custom_obj_", "opaque_obj_")):
            raise ImportFailed(
                f"{name} stores {key!r} as a pickled object, which hil does not load",
                hint="export a module with tensors and numbers as the only constants",
            )
        if record not in sizes:
            raise ImportFailed(f"{name} is damaged: missing {record}")
        meta = payload.get("tensor_meta") or {"sizes": []}
        elements = math.prod(int(size["as_int"]) for size in meta["sizes"])
        if not payload["use_pickle"] and elements and not sizes[record]:
            raise ImportFailed(f"{name} is damaged: {key!r} has {elements} elements but no data")


@contextlib.contextmanager
def _restrict_unpickling() -> Iterator[None]:
    """Restrict unpickling in torch, such as of example inputs, to tensors and plain containers."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = {key: value for key, value in os.environ.items() if key == name}
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _collect_torch_errors() -> Iterator[list[BaseException]]:
    """Collect errors that torch.export.load logs and then replaces by a generic error."""
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


_NAME = re.compile(r"[A-Za-z_]\w*")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029]")
# Python operators that `torch.export` writes for sizes. Other functions (call, methodcaller) could access any object.
_OPERATORS = frozenset(
    "add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ not_ xor lshift rshift getitem".split()
)
_TORCH = re.compile(r"torch\.(_sym|sym)_[a-z0-9_]+")
_MATH = re.compile(r"math\.[a-z0-9]+")
_OP = re.compile(r"torch\.ops\.(?P<namespace>\w+)\.\w+(\.\w+)?")
# Operator namespace -> module that registers it, for namespaces that torch does not register.
_REGISTERED_BY = {
    "quantized_decomposed": "torch.ao.quantization.fx._decomposed",
    "torchao": "torchao",
    "torchvision": "torchvision",
}
_NAMESPACES = frozenset({"aten", "prims", "quantized", "higher_order", *_REGISTERED_BY})
# Operators that open files.
_UNSAFE = frozenset({"aten::from_file"})
_HIGHER_ORDER = frozenset(
    "cond while_loop scan map map_impl associative_scan flex_attention wrap_with_set_grad_enabled "
    "wrap_with_autocast".split()
)
AGAIN = "save the program again with torch.export.save of the installed torch"


def read_json(name: str, data: bytes) -> Any:
    """Parse a JSON part of the file. Raises ImportFailed for invalid JSON."""
    try:
        return parse_json(data, MAX_RECORD_VALUES)
    except (ValueError, RecursionError) as error:
        raise ImportFailed(f"{name} is damaged: invalid JSON", detail=str(error)) from error


class _Checker:
    """Checker that rejects damaged programs, and any content except tensors, numbers and torch's operators."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._imported: set[str] = set()

    def check(self, program: Any) -> None:
        try:
            if program["schema_version"]["major"] is None:
                raise KeyError("major")
            self._walk(program["graph_module"])
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ImportFailed(f"{self._name} is damaged: {type(error).__name__}: {error}", hint=AGAIN) from error

    def _walk(self, value: Any) -> None:
        if isinstance(value, list):
            for item in value:
                self._walk(item)
        elif isinstance(value, dict):
            for key, item in value.items():
                self._check_field(str(key), item)

    def _check_field(self, key: str, value: Any) -> None:
        if _CONTROL.search(key):
            raise self._make_refused_error("a name", key)
        if isinstance(value, str):
            if _CONTROL.search(value) or ("\n" in value and key != "stack_trace"):
                raise self._make_refused_error("text", value)
            if key == "expr_str":
                self._check_expression(value)
            elif key in ("target", "as_operator"):
                self._check_operator(value)
            elif key in ("name", "as_name") and value and not _NAME.fullmatch(value):
                raise self._make_refused_error("a name", value)
            elif key in ("in_spec", "out_spec"):
                self._check_tree(read_json(self._name, value.encode()))
        elif key == "forward_arg_names":
            for name in value or ():
                if not _NAME.fullmatch(name):
                    raise self._make_refused_error("a name", name)
        else:
            self._walk(value)

    def _check_expression(self, text: str) -> None:
        try:
            check_size(text)
        except ValueError as error:
            raise self._make_refused_error("a size", text) from error

    def _check_operator(self, target: str) -> None:
        first, _, rest = target.partition(".")
        if first == "_operator" and rest in _OPERATORS and hasattr(operator, rest):
            return
        if _TORCH.fullmatch(target) or _MATH.fullmatch(target):
            return
        match = _OP.fullmatch(target)
        if match is None or match["namespace"] not in _NAMESPACES:
            raise self._make_refused_error("an operator", target)
        self._check_registered(match["namespace"], target)

    def _check_registered(self, namespace: str, target: str) -> None:
        import torch
        from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

        module = _REGISTERED_BY.get(namespace)
        if module and module not in self._imported:
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                raise ImportFailed(
                    f"{self._name} uses {target}, which requires {module}: package not installed",
                    hint=f"pip install {module.partition('.')[0]}",
                ) from error
            except Exception as error:  # the module's libraries may not match this torch
                raise ImportFailed(
                    f"{self._name} uses {target}, which requires {module}: cannot import it: {get_first_line(error)}",
                    hint=import_hint(error),
                ) from error
            self._imported.add(module)
        found: Any = torch.ops
        for part in target.split(".")[2:]:
            found = getattr(found, part, None)
        if isinstance(found, HigherOrderOperator):
            if found.name() in _HIGHER_ORDER:
                return
        elif isinstance(found, OpOverload):
            if found.name().partition(".")[0] not in _UNSAFE:
                return
        elif not isinstance(found, OpOverloadPacket):
            raise ImportFailed(
                f"{self._name} uses {target}, which is missing in the installed torch",
                hint="save the program with the installed torch release, and without custom operators",
            )
        raise self._make_refused_error("an operator", target)

    def _check_tree(self, spec: Any) -> None:
        """Check a pytree of plain containers.

        For a defaultdict or an enum, torch would import a module that the file names.
        """
        if isinstance(spec, list):
            for item in spec:
                self._check_tree(item)
        elif isinstance(spec, dict):
            if spec.keys() & {"default_factory_module", "__enum__", "fqn"}:
                raise self._make_refused_error("a container", json.dumps(spec))
            for key, item in spec.items():
                if key == "context" and isinstance(item, str) and item[:1] in "[{":
                    self._check_tree(read_json(self._name, item.encode()))
                else:
                    self._check_tree(item)
        elif isinstance(spec, str) and (
            "__enum__" in spec or "default_factory_module" in spec or _CONTROL.search(spec)
        ):
            raise self._make_refused_error("a container", spec)

    def _make_refused_error(self, what: str, text: str) -> ImportFailed:
        return ImportFailed(
            f"{self._name} has {what} that hil does not allow: {text[:120]!r}",
            hint="export the program with tensors, numbers and torch operators only",
        )
