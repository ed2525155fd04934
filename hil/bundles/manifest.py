"""Convert between a bundle's content and the file parts: a JSON manifest and the blobs. Files are untrusted."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

from hil.bundles.cases import BundleProgram, Method, MethodTestCase, MethodTestSuite, Signature
from hil.bundles.layout import MAX_BLOBS, CaseBlobs
from hil.bundles.names import can_coexist, is_shown
from hil.core.digest import check, digest_of
from hil.core.results import Control, Relation
from hil.core.tensors import DTYPES, Array, TensorSpec, from_bytes, get_dtype_name, to_bytes
from hil.errors import UsageError
from hil.formats.control_json import decode_control, encode_control

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
_HINT = "the file was not written by hil, or is corrupt: copy it from its source"


def take(value: Any, where: str, **fields: type | tuple[type, ...]) -> list[Any]:
    """Return the values of a JSON object with exactly these fields and types. Raises UsageError otherwise."""
    if not isinstance(value, dict) or value.keys() != fields.keys():
        raise make_manifest_error(where, f"must be an object with the fields {', '.join(fields)}")
    for name, kinds in fields.items():
        found = value[name]
        # In Python bool is an int, but JSON's true is not a number.
        if not isinstance(found, kinds) or (isinstance(found, bool) and kinds is not bool):
            raise make_manifest_error(f"{where}.{name}", "has the wrong type")
    return [value[name] for name in fields]


def check_items(value: Sequence[Any], where: str, most: int) -> Sequence[Any]:
    """Check the length of a JSON array. Raises UsageError if the array has more than ``most`` items."""
    if len(value) > most:
        raise make_manifest_error(where, f"has {len(value)} entries, at most {most} are allowed")
    return value


def name_of(text: str, where: str, *, most: int = MAX_NAME, empty: bool = False) -> str:
    """Check that a text is printable, with a limited length. Raises UsageError otherwise."""
    if not (empty or text) or len(text) > most or not is_shown(text):
        raise make_manifest_error(where, "is empty, too long, or contains unprintable characters")
    return text


def check_file_name(text: str, where: str) -> str:
    """Check that a program's file name is relative and inside the program's directory.

    Raises:
        UsageError: the name is invalid, or refers outside the directory.
    """
    path = PurePosixPath(name_of(text, where))
    if len(text.encode()) > MAX_NAME:  # file systems limit bytes, not characters
        raise make_manifest_error(where, f"exceeds {MAX_NAME} bytes, the limit for file names")
    if path.is_absolute() or str(path) != text or ".." in path.parts or "\\" in text or ":" in text or text == ".":
        raise make_manifest_error(where, f"is {text[:80]!r}, which is not a path inside the program's directory")
    return text


def encode_signature(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    """Return the inputs or outputs of a method as JSON values."""
    return [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in specs]


def parse_specs(value: Sequence[Any], where: str) -> tuple[TensorSpec, ...]:
    """Parse the result of :func:`encode_signature`. Raises UsageError if the value is invalid."""
    specs = []
    for number, item in enumerate(check_items(value, where, MAX_TENSORS)):
        here = f"{where}[{number}]"
        name, dtype, shape = take(item, here, name=str, dtype=str, shape=list)
        for dim in shape:
            if isinstance(dim, str):
                name_of(dim, f"{here}.shape")
        _count_elements([dim for dim in shape if dim is not None and not isinstance(dim, str)], len(shape), here)
        specs.append(TensorSpec(name_of(name, here), _check_dtype(dtype, here), tuple(shape)))
    if len({spec.name for spec in specs}) != len(specs):
        raise make_manifest_error(where, "has two tensors with the same name")
    return tuple(specs)


def read_tensor(value: Any, blobs: CaseBlobs, where: str) -> tuple[str, Array]:
    """Return a tensor's name, and a view of its blob (strings are copied)."""
    name, dtype, shape, blob = take(value, where, name=str, dtype=str, shape=list, blob=str)
    data = find_blob(blob, blobs, where)
    if not blobs.spend(data.nbytes):
        raise make_manifest_error(where, "exceeds the limit for blobs shared between cases")
    count = _count_elements(shape, len(shape), where)
    if _check_dtype(dtype, where) == "string" and 4 * count > data.nbytes:
        raise make_manifest_error(where, f"has {data.nbytes} bytes, not enough for {count} strings")
    try:
        array = from_bytes(data, dtype, shape)
    except UsageError as error:
        raise make_manifest_error(where, f"does not match its description: {error.message}") from error
    # A bool byte other than 0 and 1 would be undefined behaviour in compiled code.
    if dtype == "bool" and array.size and array.view("uint8").max() > 1:
        raise make_manifest_error(where, "contains invalid bool bytes")
    return name_of(name, where), array


def find_blob(digest: str, blobs: Mapping[str, memoryview], where: str) -> memoryview:
    """Return the blob for a digest. Raises UsageError if missing."""
    if digest not in blobs:
        raise make_manifest_error(where, f"refers to a missing blob: {digest[:80]!r}")
    return blobs[digest]


def check_made(value: Any, where: str = "made", depth: int = 0) -> None:
    """Check that a creation record is displayable: valid Unicode, limited depth. Raises UsageError otherwise."""
    if depth > MAX_DEPTH:
        raise make_manifest_error(where[:MAX_NAME], "exceeds the nesting limit")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise make_manifest_error(where, "contains an unpaired surrogate") from error
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_made(key, where, depth + 1)
            check_made(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            check_made(item, f"{where}[{number}]", depth + 1)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise make_manifest_error(where, "is not a JSON value")


def make_manifest_error(where: str, why: str) -> UsageError:
    """Return the error for an invalid manifest."""
    return UsageError(f"the bundle's manifest: {where} {why}", hint=_HINT)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ELEMENTS


def _count_elements(sizes: Sequence[Any], rank: int, where: str) -> int:
    """Check a tensor's sizes and return their product. ``sizes`` excludes symbolic dimensions."""
    if rank > MAX_RANK:
        raise make_manifest_error(f"{where}.shape", f"has {rank} entries, at most {MAX_RANK} are allowed")
    if not all(map(_is_size, sizes)):
        raise make_manifest_error(f"{where}.shape", "has an invalid dimension")
    # Skip zeros: numpy also computes strides for tensors without elements, and the product must not overflow.
    if math.prod(dim for dim in sizes if dim) > MAX_ELEMENTS:
        raise make_manifest_error(f"{where}.shape", "exceeds the element limit")
    return math.prod(sizes)


def _check_dtype(name: str, where: str) -> str:
    if name not in DTYPES:
        raise make_manifest_error(where, f"has an unknown dtype: {name[:80]!r}")
    return name


def read_blob_table(document: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the digest and size of every blob in a manifest.

    Raises:
        UsageError: the manifest is invalid, or lists a blob twice.
    """
    table = []
    for number, item in enumerate(check_items(_take_parts(document)[-1], "blobs", MAX_BLOBS)):
        digest, size = take(item, f"blobs[{number}]", digest=str, size=int)
        if not _is_size(size):
            raise make_manifest_error(f"blobs[{number}].size", "is not a valid size")
        table.append((check(digest), size))
    if len(dict(table)) != len(table):
        raise make_manifest_error("blobs", "contains a duplicate blob")
    return table


def read_program_files(document: Mapping[str, Any]) -> tuple[dict[str, str], str, str, list[str]]:
    """Return a manifest's program files (name -> digest), main file, runtime, and method names.

    Raises:
        UsageError: the manifest is invalid.
    """
    program, methods, _, _ = _take_parts(document)
    runtime, main, files, _, _ = take(program, "program", **_PROGRAM)
    digests: dict[str, str] = {}
    for number, item in enumerate(check_items(files, "program.files", MAX_FILES)):
        where = f"program.files[{number}]"
        name, blob = take(item, where, name=str, blob=str)
        digests[check_file_name(name, where)] = blob
    if len(digests) != len(files):
        raise make_manifest_error("program.files", "contains a duplicate name")
    if not can_coexist(digests):
        raise make_manifest_error("program.files", "contains two conflicting file names")
    if main not in digests:
        raise make_manifest_error("program.main", "is missing from program.files")
    names = [str(item.get("name")) if isinstance(item, dict) else "" for item in methods]
    return digests, main, runtime, names


def _take_parts(document: Mapping[str, Any]) -> list[Any]:
    return take(document, "document", program=dict, methods=list, made=dict, blobs=list)


def to_document(
    program: BundleProgram, methods: Sequence[Method], made: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, memoryview]]:
    """Return the manifest, and the blobs in order of first reference, without duplicates."""
    blobs: dict[str, memoryview] = {}

    def add_blob(data: memoryview) -> str:
        digest = digest_of(data)
        blobs.setdefault(digest, data)
        return digest

    def add_tensors(given: Mapping[str, Array]) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "dtype": get_dtype_name(array.dtype),
                "shape": list(array.shape),
                "blob": add_blob(to_bytes(array)),
            }
            for name, array in given.items()
        ]

    check_made(made)
    document = {
        "program": {
            "runtime": program.runtime,
            "main": program.main,
            "files": [{"name": name, "blob": add_blob(data)} for name, data in program.files.items()],
            "compiler": program.compiler,
            "flags": list(program.flags),
        },
        "methods": [
            {
                "name": method.name,
                "inputs": encode_signature(method.signature.inputs),
                "outputs": encode_signature(method.signature.outputs),
                "cases": [
                    {
                        "name": case.name,
                        "source": case.source,
                        "rtol": case.rtol,
                        "atol": case.atol,
                        "inputs": add_tensors(case.inputs),
                        "outputs": add_tensors(case.expected_outputs),
                        **({"noise": add_tensors(case.noise)} if case.noise else {}),
                        **accept_json(case.accept),
                        **encode_relation(case.relation),
                        **encode_controls(case.control),
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
    document: Mapping[str, Any], blobs: CaseBlobs
) -> tuple[BundleProgram, list[tuple[Signature, MethodTestSuite]], dict[str, Any]]:
    """Return the program, the methods with cases, and the creation record from a manifest and the blobs.

    Cases are not yet checked against their method.

    Raises:
        UsageError: the manifest is invalid.
    """
    program, methods, made, _ = _take_parts(document)
    digests, main, runtime, _ = read_program_files(document)
    *_, compiler, flags = take(program, "program", **_PROGRAM)
    for number, flag in enumerate(check_items(flags, "program.flags", MAX_TENSORS)):
        if not isinstance(flag, str):
            raise make_manifest_error(f"program.flags[{number}]", "has the wrong type")
        name_of(flag, f"program.flags[{number}]", most=MAX_TEXT, empty=True)
    check_made(made)
    files = {name: find_blob(blob, blobs, f"program file {name!r}") for name, blob in digests.items()}
    listed = check_items(methods, "methods", MAX_METHODS)
    read = [_read_method(item, blobs, f"methods[{number}]") for number, item in enumerate(listed)]
    if not read or len({suite.method_name for _, suite in read}) != len(read):
        raise make_manifest_error("methods", "is empty or contains a duplicate name")
    tensors = (
        tensor["blob"]
        for method in methods
        for case in method["cases"]
        for kind in ("inputs", "outputs", "noise")
        for tensor in case.get(kind, ())
    )
    # Reject unused blobs, because a change in such a blob would not be noticed.
    if set(blobs) - set(digests.values()) - set(tensors):
        raise make_manifest_error("blobs", "contains an unused blob")
    if not _WORD.fullmatch(runtime):  # check early, because boards receive the runtime's name first
        raise make_manifest_error("program.runtime", "is not a valid runtime name")
    content = BundleProgram(
        runtime,
        main,
        MappingProxyType(files),
        name_of(compiler, "program.compiler", most=MAX_TEXT, empty=True),
        tuple(flags),
    )
    return content, read, made


def _read_method(value: Any, blobs: CaseBlobs, where: str) -> tuple[Signature, MethodTestSuite]:
    name, inputs, outputs, cases = take(value, where, name=str, inputs=list, outputs=list, cases=list)
    signature = Signature(parse_specs(inputs, f"{where}.inputs"), parse_specs(outputs, f"{where}.outputs"))
    listed = check_items(cases, f"{where}.cases", MAX_CASES)
    given = [_read_case(item, blobs, f"{where}.cases[{number}]") for number, item in enumerate(listed)]
    return signature, MethodTestSuite(name_of(name, f"{where}.name"), given)


def _read_case(value: Any, blobs: CaseBlobs, where: str) -> MethodTestCase:
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
    """Return the JSON field for a case's criteria; empty without criteria."""
    return {"accept": list(accept)} if accept else {}


def take_accept(value: Any, where: str) -> tuple[Any, tuple[str, ...]]:
    """Split a case into its other fields and the criteria. Raises UsageError if the criteria are damaged."""
    if not isinstance(value, dict) or "accept" not in value:
        return value, ()
    where, given = f"{where}.accept", value["accept"]
    if not isinstance(given, list) or not given or not all(isinstance(text, str) for text in given):
        raise make_manifest_error(where, "has the wrong type")
    texts = [name_of(text, where, most=MAX_TEXT) for text in check_items(given, where, MAX_TENSORS)]
    return {key: one for key, one in value.items() if key != "accept"}, tuple(texts)


def encode_controls(controls: Mapping[str, Control]) -> dict[str, Any]:
    """Return the JSON field for a case's controls; empty without controls."""
    return {"control": {name: encode_control(one) for name, one in controls.items()}} if controls else {}


def take_controls(value: Any, where: str) -> tuple[Any, dict[str, Control]]:
    """Split a case into its other fields and the controls. Raises UsageError if the controls are damaged."""
    if not isinstance(value, dict) or "control" not in value:
        return value, {}
    where, given = f"{where}.control", value["control"]
    try:
        controls = {name_of(name, where): decode_control(one) for name, one in given.items()}
        for name, control in controls.items():
            name_of(control.source, f"{where}.{name}.source", most=MAX_TEXT, empty=True)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise make_manifest_error(where, "is damaged") from error
    return {key: one for key, one in value.items() if key != "control"}, controls


def encode_relation(relation: Relation) -> dict[str, Any]:
    """Return the JSON field for a case's relation; empty for an independent source."""
    return {} if relation is Relation.INDEPENDENT else {"relation": relation.value}


def take_relation(value: Any, where: str) -> tuple[Any, Relation]:
    """Split the JSON of a case into the relation and all other fields. Returns the other fields first.

    Raises:
        UsageError: the relation is unknown.
    """
    if not isinstance(value, dict) or "relation" not in value:
        return value, Relation.INDEPENDENT
    rest = {key: one for key, one in value.items() if key != "relation"}
    try:
        return rest, Relation(value["relation"])
    except ValueError:
        raise make_manifest_error(f"{where}.relation", f"must be one of {', '.join(Relation)}") from None


def take_noise(value: Any, where: str) -> tuple[Any, list[Any]]:
    """Split the JSON of a case into the noise tensors and all other fields. Returns the other fields first.

    Raises:
        UsageError: the noise is damaged, or from a hil version that measured noise across jumps.
    """
    if not isinstance(value, dict) or "noise" not in value:
        return value, []
    noise = value["noise"]
    if isinstance(noise, dict):
        raise UsageError(
            f"case {str(value.get('name'))[:80]!r}: an earlier version of hil measured the noise; "
            "this noise can hide wrong outputs",
            hint="create a new bundle",
        )
    if not isinstance(noise, list) or not noise:
        raise make_manifest_error(f"{where}.noise", "has the wrong type")
    return {key: one for key, one in value.items() if key != "noise"}, noise


def _read_tensors(given: Sequence[Any], blobs: CaseBlobs, where: str) -> dict[str, Array]:
    found = [
        read_tensor(item, blobs, f"{where}[{place}]")
        for place, item in enumerate(check_items(given, where, MAX_TENSORS))
    ]
    if len(dict(found)) != len(found):
        raise make_manifest_error(where, "has two tensors with the same name")
    return dict(found)
