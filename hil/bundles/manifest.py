"""A bundle's content as a manifest (JSON that says what the blobs are) and blobs. Reading it believes nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

from hil.bundles.cases import Method, MethodTestCase, MethodTestSuite, Program, Signature
from hil.bundles.layout import MAX_BLOBS
from hil.core.digest import check, digest_of
from hil.core.results import Control, Relation
from hil.core.tensors import DTYPES, Array, TensorSpec, dtype_name, from_bytes, to_bytes
from hil.errors import UsageError
from hil.formats.control_json import control_from_json, control_json

MAX_NAME = 255
MAX_TEXT = 1 << 16
MAX_FILES = 1000
MAX_METHODS = 1000
MAX_CASES = 100_000
MAX_TENSORS = 10_000
MAX_RANK = 32
MAX_ELEMENTS = 1 << 48
MAX_DEPTH = 16
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PROGRAM: dict[str, type] = {"runtime": str, "main": str, "files": list, "compiler": str, "flags": list}
_HINT = "the file was not written by hil, or is damaged: get it again"


def take(value: Any, where: str, **fields: type | tuple[type, ...]) -> list[Any]:
    """The fields of a JSON object, which must be just these, each of its type. Raises UsageError: it has others."""
    if not isinstance(value, dict) or value.keys() != fields.keys():
        raise refused(where, f"must be an object of {', '.join(fields)}")
    for name, kinds in fields.items():
        found = value[name]
        # JSON's true is no number.
        if not isinstance(found, kinds) or (isinstance(found, bool) and kinds is not bool):
            raise refused(f"{where}.{name}", "is of the wrong type")
    return [value[name] for name in fields]


def items(value: Sequence[Any], where: str, most: int) -> Sequence[Any]:
    """A JSON array of at most so many items. Raises UsageError: it has more."""
    if len(value) > most:
        raise refused(where, f"has {len(value)} entries, {most} are allowed")
    return value


def name_of(text: str, where: str, *, most: int = MAX_NAME, empty: bool = False) -> str:
    """A text that can be shown: no control characters, not endless. Raises UsageError: it is none."""
    if not (empty or text) or len(text) > most or not text.isprintable():
        raise refused(where, "is empty, too long, or holds characters that cannot be shown")
    return text


def file_name(text: str, where: str) -> str:
    """The name of a program's file: relative, and inside the program's folder wherever that is.

    Raises:
        UsageError: it leads elsewhere.
    """
    path = PurePosixPath(name_of(text, where))
    if len(text.encode()) > MAX_NAME:  # file systems count bytes
        raise refused(where, "is too long for the name of a file")
    if path.is_absolute() or str(path) != text or ".." in path.parts or "\\" in text or ":" in text or text == ".":
        raise refused(where, f"is {text[:80]!r}, which is no name inside the program's folder")
    return text


def signature_json(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    """What a method takes or gives."""
    return [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in specs]


def specs_of(value: Sequence[Any], where: str) -> tuple[TensorSpec, ...]:
    """The reverse of :func:`signature_json`. Raises UsageError: it is none."""
    specs = []
    for number, item in enumerate(items(value, where, MAX_TENSORS)):
        here = f"{where}[{number}]"
        name, dtype, shape = take(item, here, name=str, dtype=str, shape=list)
        for dim in shape:
            if isinstance(dim, str):
                name_of(dim, f"{here}.shape")
        _elements([dim for dim in shape if dim is not None and not isinstance(dim, str)], len(shape), here)
        specs.append(TensorSpec(name_of(name, here), _dtype(dtype, here), tuple(shape)))
    if len({spec.name for spec in specs}) != len(specs):
        raise refused(where, "has two tensors of one name")
    return tuple(specs)


def tensor_of(value: Any, blobs: Mapping[str, memoryview], where: str) -> tuple[str, Array]:
    """A tensor's name and a view of its blob (texts are copied out)."""
    name, dtype, shape, blob = take(value, where, name=str, dtype=str, shape=list, blob=str)
    data = blob_of(blob, blobs, where)
    count = _elements(shape, len(shape), where)
    if _dtype(dtype, where) == "string" and 4 * count > data.nbytes:
        raise refused(where, f"has {data.nbytes} bytes, too few for {count} texts")
    try:
        array = from_bytes(data, dtype, shape)
    except UsageError as error:
        raise refused(where, f"does not hold what it says: {error.message}") from error
    # A byte that is no bool would be undefined behaviour in whatever computes with it.
    if dtype == "bool" and array.size and array.view("uint8").max() > 1:
        raise refused(where, "holds bytes that are no bool")
    return name_of(name, where), array


def blob_of(digest: str, blobs: Mapping[str, memoryview], where: str) -> memoryview:
    """The blob of a digest. Raises UsageError: there is none."""
    if digest not in blobs:
        raise refused(where, f"names a blob that is not there: {digest[:80]!r}")
    return blobs[digest]


def check_made(value: Any, where: str = "made", depth: int = 0) -> None:
    """Refuse a record of how a bundle was made that nobody could show: too deep, or with texts that are no Unicode."""
    if depth > MAX_DEPTH:
        raise refused(where[:MAX_NAME], "is too deep")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise refused(where, "holds half a character") from error
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_made(key, where, depth + 1)
            check_made(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            check_made(item, f"{where}[{number}]", depth + 1)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise refused(where, "is nothing that JSON knows")


def refused(where: str, why: str) -> UsageError:
    """The error for a manifest that says what cannot be."""
    return UsageError(f"the bundle's manifest: {where} {why}", hint=_HINT)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ELEMENTS


def _elements(sizes: Sequence[Any], rank: int, where: str) -> int:
    """How many elements a tensor of these sizes has; those of its dimensions that are symbols are not among them."""
    if rank > MAX_RANK:
        raise refused(f"{where}.shape", f"has {rank} entries, {MAX_RANK} are allowed")
    if not all(map(_is_size, sizes)):
        raise refused(f"{where}.shape", "has a dimension that is no size")
    # Without the zeros: numpy multiplies strides whether or not there is an element.
    if math.prod(dim for dim in sizes if dim) > MAX_ELEMENTS:
        raise refused(f"{where}.shape", "has more elements than any machine holds")
    return math.prod(sizes)


def _dtype(name: str, where: str) -> str:
    if name not in DTYPES:
        raise refused(where, f"has a dtype that hil does not know: {name[:80]!r}")
    return name


def blob_table(document: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Digest and size of every blob, of a manifest.

    Raises:
        UsageError: it says what cannot be, or a blob stands there twice.
    """
    table = []
    for number, item in enumerate(items(_parts(document)[-1], "blobs", MAX_BLOBS)):
        digest, size = take(item, f"blobs[{number}]", digest=str, size=int)
        if not _is_size(size):
            raise refused(f"blobs[{number}].size", "is no size")
        table.append((check(digest), size))
    if len(dict(table)) != len(table):
        raise refused("blobs", "has one blob twice")
    return table


def program_files(document: Mapping[str, Any]) -> tuple[dict[str, str], str, str, list[str]]:
    """Of a manifest: the program's files (name -> digest), its main file, its runtime, and the names of its methods.

    Raises:
        UsageError: it says what cannot be.
    """
    program, methods, _, _ = _parts(document)
    runtime, main, files, _, _ = take(program, "program", **_PROGRAM)
    digests: dict[str, str] = {}
    for number, item in enumerate(items(files, "program.files", MAX_FILES)):
        where = f"program.files[{number}]"
        name, blob = take(item, where, name=str, blob=str)
        digests[file_name(name, where)] = blob
    if len(digests) != len(files):
        raise refused("program.files", "has one name twice")
    # They have to stand beside one another on every file system.
    folded = {name.casefold() for name in digests}
    folders = {str(parent) for name in folded for parent in PurePosixPath(name).parents}
    if len(folded) != len(digests) or folders & folded:
        raise refused("program.files", "has two files whose names do not go together")
    if main not in digests:
        raise refused("program.main", "is none of its files")
    names = [str(item.get("name")) if isinstance(item, dict) else "" for item in methods]
    return digests, main, runtime, names


def _parts(document: Mapping[str, Any]) -> list[Any]:
    return take(document, "it", program=dict, methods=list, made=dict, blobs=list)


def to_document(
    program: Program, methods: Sequence[Method], made: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, memoryview]]:
    """The manifest, and the blobs that it names in the order in which it does; equal ones are one."""
    blobs: dict[str, memoryview] = {}

    def blob(data: memoryview) -> str:
        digest = digest_of(data)
        blobs.setdefault(digest, data)
        return digest

    def tensors(given: Mapping[str, Array]) -> list[dict[str, Any]]:
        return [
            {"name": name, "dtype": dtype_name(array.dtype), "shape": list(array.shape), "blob": blob(to_bytes(array))}
            for name, array in given.items()
        ]

    check_made(made)
    document = {
        "program": {
            "runtime": program.runtime,
            "main": program.main,
            "files": [{"name": name, "blob": blob(data)} for name, data in program.files.items()],
            "compiler": program.compiler,
            "flags": list(program.flags),
        },
        "methods": [
            {
                "name": method.name,
                "inputs": signature_json(method.signature.inputs),
                "outputs": signature_json(method.signature.outputs),
                "cases": [
                    {
                        "name": case.name,
                        "source": case.source,
                        "rtol": case.rtol,
                        "atol": case.atol,
                        "inputs": tensors(case.inputs),
                        "outputs": tensors(case.expected_outputs),
                        **({"noise": tensors(case.noise)} if case.noise else {}),
                        **accept_json(case.accept),
                        **relation_json(case.relation),
                        **controls_json(case.control),
                    }
                    for case in method.cases
                ],
            }
            for method in methods
        ],
        "made": dict(made),
    }
    return {**document, "blobs": [{"digest": key, "size": data.nbytes} for key, data in blobs.items()]}, blobs


def from_document(
    document: Mapping[str, Any], blobs: Mapping[str, memoryview]
) -> tuple[Program, list[tuple[Signature, MethodTestSuite]], dict[str, Any]]:
    """The program, its methods with their cases, and how they were made, of a manifest and its blobs.

    Nobody has looked yet whether a case fits its method.

    Raises:
        UsageError: the manifest says what cannot be.
    """
    program, methods, made, _ = _parts(document)
    digests, main, runtime, _ = program_files(document)
    *_, compiler, flags = take(program, "program", **_PROGRAM)
    for number, flag in enumerate(items(flags, "program.flags", MAX_TENSORS)):
        if not isinstance(flag, str):
            raise refused(f"program.flags[{number}]", "is of the wrong type")
        name_of(flag, f"program.flags[{number}]", most=MAX_TEXT, empty=True)
    check_made(made)
    files = {name: blob_of(blob, blobs, f"program file {name!r}") for name, blob in digests.items()}
    listed = items(methods, "methods", MAX_METHODS)
    read = [_read_method(item, blobs, f"methods[{number}]") for number, item in enumerate(listed)]
    if not read or len({suite.method_name for _, suite in read}) != len(read):
        raise refused("methods", "is empty or has one name twice")
    tensors = (
        tensor["blob"]
        for method in methods
        for case in method["cases"]
        for kind in ("inputs", "outputs", "noise")
        for tensor in case.get(kind, ())
    )
    # What nobody reads nobody would miss either.
    if set(blobs) - set(digests.values()) - set(tensors):
        raise refused("blobs", "has one that nothing names")
    if not _WORD.fullmatch(runtime):  # it is told to boards before anything else is
        raise refused("program.runtime", "is no name of a runtime")
    content = Program(
        runtime,
        main,
        MappingProxyType(files),
        name_of(compiler, "program.compiler", most=MAX_TEXT, empty=True),
        tuple(flags),
    )
    return content, read, made


def _read_method(value: Any, blobs: Mapping[str, memoryview], where: str) -> tuple[Signature, MethodTestSuite]:
    name, inputs, outputs, cases = take(value, where, name=str, inputs=list, outputs=list, cases=list)
    signature = Signature(specs_of(inputs, f"{where}.inputs"), specs_of(outputs, f"{where}.outputs"))
    listed = items(cases, f"{where}.cases", MAX_CASES)
    given = [_read_case(item, blobs, f"{where}.cases[{number}]") for number, item in enumerate(listed)]
    return signature, MethodTestSuite(name_of(name, f"{where}.name"), given)


def _read_case(value: Any, blobs: Mapping[str, memoryview], where: str) -> MethodTestCase:
    number = (float, type(None))
    value, noise = take_noise(value, where)
    value, accept = take_accept(value, where)
    value, relation = take_relation(value, where)
    value, control = take_controls(value, where)
    fields: dict[str, Any] = {"name": str, "source": str, "rtol": number, "atol": number, "inputs": list}
    name, source, rtol, atol, inputs, outputs = take(value, where, **fields, outputs=list)
    return MethodTestCase(
        _read_tensors(inputs, blobs, f"{where}.inputs"),
        _read_tensors(outputs, blobs, f"{where}.outputs"),
        rtol,
        atol,
        name_of(name, f"{where}.name"),
        name_of(source, f"{where}.source", most=MAX_TEXT, empty=True),
        _read_tensors(noise, blobs, f"{where}.noise"),
        accept,
        relation,
        control,
    )


def accept_json(accept: Sequence[str]) -> dict[str, Any]:
    """Return the field of a case that holds its criteria; nothing if there are none."""
    return {"accept": list(accept)} if accept else {}


def take_accept(value: Any, where: str) -> tuple[Any, tuple[str, ...]]:
    """Return a case's fields without its criteria, and the criteria. Raises UsageError: they are damaged."""
    if not isinstance(value, dict) or "accept" not in value:
        return value, ()
    where, given = f"{where}.accept", value["accept"]
    if not isinstance(given, list) or not given or not all(isinstance(text, str) for text in given):
        raise refused(where, "is of the wrong type")
    texts = [name_of(text, where, most=MAX_TEXT) for text in items(given, where, MAX_TENSORS)]
    return {key: one for key, one in value.items() if key != "accept"}, tuple(texts)


def controls_json(controls: Mapping[str, Control]) -> dict[str, Any]:
    """Return the field of a case that holds the control of each output; nothing if there are none."""
    return {"control": {name: control_json(one) for name, one in controls.items()}} if controls else {}


def take_controls(value: Any, where: str) -> tuple[Any, dict[str, Control]]:
    """Return a case's fields without its controls, and the controls. Raises UsageError: they are damaged."""
    if not isinstance(value, dict) or "control" not in value:
        return value, {}
    where, given = f"{where}.control", value["control"]
    try:
        controls = {name_of(name, where): control_from_json(one) for name, one in given.items()}
        for name, control in controls.items():
            name_of(control.source, f"{where}.{name}.source", most=MAX_TEXT, empty=True)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise refused(where, "is damaged") from error
    return {key: one for key, one in value.items() if key != "control"}, controls


def relation_json(relation: Relation) -> dict[str, Any]:
    """Return the field of a case that names a relation; none for an independent source."""
    return {} if relation is Relation.INDEPENDENT else {"relation": relation.value}


def take_relation(value: Any, where: str) -> tuple[Any, Relation]:
    """Return a case's fields without its relation, and the relation as :func:`relation_json` wrote it.

    Raises:
        UsageError: there is no such relation.
    """
    if not isinstance(value, dict) or "relation" not in value:
        return value, Relation.INDEPENDENT
    rest = {key: one for key, one in value.items() if key != "relation"}
    try:
        return rest, Relation(value["relation"])
    except ValueError:
        raise refused(f"{where}.relation", f"must be one of {', '.join(Relation)}") from None


def take_noise(value: Any, where: str) -> tuple[Any, list[Any]]:
    """A case's fields without its noise, and the list that says what its noise is.

    Raises:
        UsageError: it is damaged, or of a hil that measured noise across jumps.
    """
    if not isinstance(value, dict) or "noise" not in value:
        return value, []
    noise = value["noise"]
    if isinstance(noise, dict):
        raise UsageError(
            f"case {str(value.get('name'))[:80]!r} has noise that an earlier hil measured: it hides wrong answers",
            hint="create the bundle again",
        )
    if not isinstance(noise, list) or not noise:
        raise refused(f"{where}.noise", "is of the wrong type")
    return {key: one for key, one in value.items() if key != "noise"}, noise


def _read_tensors(given: Sequence[Any], blobs: Mapping[str, memoryview], where: str) -> dict[str, Array]:
    found = [tensor_of(item, blobs, f"{where}[{place}]") for place, item in enumerate(items(given, where, MAX_TENSORS))]
    if len(dict(found)) != len(found):
        raise refused(where, "has two tensors of one name")
    return dict(found)
