"""Small changes to inputs, by chance: of bytes, texts, JSON, protobuf messages and archives."""

from __future__ import annotations

import copy
import io
import json
import struct
import warnings
import zipfile
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS = (
    0,
    1,
    2,
    7,
    8,
    31,
    32,
    64,
    127,
    128,
    255,
    256,
    1023,
    4096,
    65535,
    65536,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 48,
    (1 << 62) - 1,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-320, 1e300, -1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    " ",
    "x",
    "..",
    "../../x",
    "/etc/passwd",
    "a\0b",
    "\ud800",
    "\u202e",
    "\x1b]0;x\x07",
    "²",
    "٣",
    "é" * 130,
    "x" * 300,
    "9" * 6000,
    "-1",
    "1e999",
    "nan",
    "true",
    "null",
    "{}",
    "[]",
    "%s%n",
    "a" * 70_000,
    "\r\n",
    "=",
    "float32",
    "string",
    "int4",
    "main",
    "blake3:" + "0" * 64,
    "sha256:" + "f" * 64,
)
_MOST_DEPTH = 1200
_MOST = 1 << 20
_MOST_DOCUMENT = 1 << 16


def havoc(data: bytes, rng: Random) -> bytes:
    """Change a few bytes: flip, set, count, cut, double, move, end early."""
    held = bytearray(data)
    for _ in range(1 << rng.randrange(4)):
        _CHANGES[rng.randrange(len(_CHANGES))](held, rng)
    return bytes(held[:_MOST])


def _flip(held: bytearray, rng: Random) -> None:
    if held:
        held[rng.randrange(len(held))] ^= 1 << rng.randrange(8)


def _set(held: bytearray, rng: Random) -> None:
    if held:
        held[rng.randrange(len(held))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _number(held: bytearray, rng: Random) -> None:
    """Overwrite an aligned or unaligned number, or count it up or down: lengths and offsets are such."""
    form, size = rng.choice((("<H", 2), ("<I", 4), ("<Q", 8), (">I", 4)))
    if len(held) < size:
        return
    at = rng.randrange(len(held) - size + 1)
    at -= at % size if rng.random() < 0.7 else 0
    (value,) = struct.unpack_from(form, held, at)
    value = rng.choice((rng.choice(INTEGERS), value + rng.randint(-16, 16), -value, len(held), value << 1))
    struct.pack_into(form, held, at, value % (1 << 8 * size))


def _cut(held: bytearray, rng: Random) -> None:
    begin = rng.randrange(len(held) + 1)
    del held[begin : begin + _span(held, rng)]


def _double(held: bytearray, rng: Random) -> None:
    begin = rng.randrange(len(held) + 1)
    held[begin:begin] = held[begin : begin + _span(held, rng)] * rng.choice((1, 1, 2, 16))


def _move(held: bytearray, rng: Random) -> None:
    size = _span(held, rng)
    if len(held) > size:
        source, target = rng.randrange(len(held) - size), rng.randrange(len(held) - size)
        held[target : target + size] = held[source : source + size]


def _put(held: bytearray, rng: Random) -> None:
    at = rng.randrange(len(held) + 1)
    held[at:at] = rng.choice((rng.randbytes(rng.randrange(1, 16)), _encoded(rng.choice(TEXTS))[:400]))


def _end(held: bytearray, rng: Random) -> None:
    if rng.random() < 0.3:
        del held[rng.randrange(len(held) + 1) :]


def _span(held: bytearray, rng: Random) -> int:
    return min(len(held), rng.choice((1, 2, 4, 8, 16, 64, rng.randrange(1, len(held) + 2))))


_CHANGES = (_flip, _set, _set, _number, _number, _cut, _double, _move, _put, _end)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def lines(data: bytes, rng: Random, words: Sequence[bytes] = ()) -> bytes:
    """Change a text: its lines, its fields, its numbers, or just bytes of it."""
    parts = data.splitlines(keepends=True)
    for _ in range(rng.randrange(1, 4)):
        if not parts or rng.random() < 0.3:
            return havoc(b"".join(parts), rng)
        at = rng.randrange(len(parts))
        what = rng.randrange(6)
        if what == 0:
            parts.insert(at, rng.choice(parts))
        elif what == 1:
            del parts[at]
        else:
            parts[at] = _field(parts[at], rng, words)
    return b"".join(parts)[:_MOST]


def _field(line: bytes, rng: Random, words: Sequence[bytes]) -> bytes:
    mark = rng.choice([mark for mark in (b"\t", b" ", b"=", b",", b":", b'"', b"x", b".") if mark in line] or [b"\t"])
    fields = line.split(mark)
    odd = [_encoded(rng.choice(TEXTS)), str(rng.choice(INTEGERS)).encode(), b"-" + fields[0], *rng.sample(fields, 1)]
    fields[rng.randrange(len(fields))] = rng.choice([*odd, *([rng.choice(words)] if words else [])])
    return mark.join(fields)


def tree(value: Any, rng: Random) -> Any:
    """Change something, in place, in a tree of JSON or TOML. Return the tree."""
    for _ in range(1 << rng.randrange(3)):
        if not (isinstance(value, (dict, list)) and value):
            return odd_value(rng)
        holder, key = _choose_place(value, rng)
        what = rng.randrange(8)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, list):
            holder.extend(copy.deepcopy(holder[key]) for _ in range(rng.choice((1, 2, 40))))
        elif what == 1:
            holder[rng.choice(TEXTS)] = holder[key]
        elif what == 2:
            other, name = _choose_place(value, rng)
            holder[key] = copy.deepcopy(other[name])
        elif what == 3:
            holder[key] = _nested(holder[key], rng)
        else:
            holder[key] = _like(holder[key], rng) if rng.random() < 0.6 else odd_value(rng)
    return value


def _choose_place(value: dict[str, Any] | list[Any], rng: Random) -> tuple[Any, Any]:
    """Return a dict or list of a tree, and one of its keys."""
    holder: Any = value
    while True:
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        inner = holder[key]
        if not (isinstance(inner, (dict, list)) and inner) or rng.random() < 0.2:
            return holder, key
        holder = inner


def _nested(value: Any, rng: Random) -> Any:
    for _ in range(rng.choice((1, 3, 20, 60))):
        value = [value] if rng.random() < 0.5 else {"x": value}
    return value


def _like(value: Any, rng: Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + rng.randint(-2, 2), -value, rng.choice(INTEGERS), float(value % (1 << 60))))
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if isinstance(value, str):
        return rng.choice((rng.choice(TEXTS), value * 2, value[: len(value) // 2], value.upper(), value + "\0"))
    return odd_value(rng)


def odd_value(rng: Random) -> Any:
    """Anything that JSON can say."""
    return rng.choice(
        (
            None,
            True,
            [],
            {},
            rng.choice(INTEGERS),
            -rng.choice(INTEGERS),
            rng.choice(FLOATS),
            rng.choice(TEXTS),
            [rng.choice(INTEGERS)] * 3,
            {rng.choice(TEXTS): 1},
        )
    )


def json_bytes(data: bytes, rng: Random) -> bytes:
    """Change a JSON document; what cannot be read as one is changed as bytes."""
    if rng.random() < 0.1:
        depth = rng.randrange(_MOST_DEPTH, 200 * _MOST_DEPTH)
        return rng.choice((b"[" * depth, b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth))
    try:
        return _encoded(json.dumps(tree(json.loads(data), rng), ensure_ascii=rng.random() < 0.5))
    except (ValueError, RecursionError):
        return havoc(data, rng)


def message(given: Message, rng: Random, *, times: int = 0) -> None:
    """Change a protobuf message in place: some fields of it, or of the messages in it."""
    for _ in range(times or 1 << rng.randrange(3)):
        holder = given
        while (inner := _inner(holder)) and rng.random() < 0.8:
            holder = rng.choice(inner)
        if holder.DESCRIPTOR.fields:
            _change_field(holder, rng.choice(holder.DESCRIPTOR.fields), rng)


def _inner(holder: Message) -> list[Message]:
    found: list[Message] = []
    for field, value in holder.ListFields():
        if field.type != FieldDescriptor.TYPE_MESSAGE or _is_map(field):
            continue
        found += list(value)[:50] if field.is_repeated else [value]
    return found


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def _change_field(holder: Message, field: FieldDescriptor, rng: Random) -> None:
    if _is_map(field) or rng.random() < 0.15:
        holder.ClearField(field.name)
    elif field.is_repeated:
        _change_repeated(getattr(holder, field.name), field, rng)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        inner = getattr(holder, field.name)
        inner.SetInParent()
        if inner.DESCRIPTOR.fields:
            _change_field(inner, rng.choice(inner.DESCRIPTOR.fields), rng)
    else:
        setattr(holder, field.name, _scalar(field, getattr(holder, field.name), rng))


def _change_repeated(values: Any, field: FieldDescriptor, rng: Random) -> None:
    what = rng.randrange(5)
    if what == 0 and values:
        del values[rng.randrange(len(values))]
    elif what == 1 and values and len(values) < 5000:
        values.extend(list(values)[: rng.choice((1, 3, 500))])
    elif what == 2 and len(values) > 1:
        first, second = rng.randrange(len(values)), rng.randrange(len(values))
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            values[first].CopyFrom(copy.copy(values[second]))
        else:
            values[first] = values[second]
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        added = values.add()
        if added.DESCRIPTOR.fields:
            _change_field(added, rng.choice(added.DESCRIPTOR.fields), rng)
    elif values and what == 3:
        at = rng.randrange(len(values))
        values[at] = _scalar(field, values[at], rng)
    else:
        values.extend([_scalar(field, None, rng)] * rng.choice((1, 1, 2, 70)))


_BITS = {
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_SINT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_FIXED32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.TYPE_FIXED64: (0, (1 << 64) - 1),
}


def _scalar(field: FieldDescriptor, old: Any, rng: Random) -> Any:
    kind = field.type
    if kind == FieldDescriptor.TYPE_STRING:
        old = old.decode(errors="replace") if isinstance(old, bytes) else old
        if old and old[0] in "{[" and rng.random() < 0.8:  # a document in a text
            return json_bytes(old.encode(), rng)[:_MOST_DOCUMENT].decode(errors="replace")
        text = rng.choice((rng.choice(TEXTS), f"{old or ''}x", (old or "")[:-1]))
        return text.encode(errors="replace").decode()
    if kind == FieldDescriptor.TYPE_BYTES:
        return havoc(old or b"", rng) if rng.random() < 0.5 else rng.randbytes(rng.choice((0, 1, 8, 200)))
    if kind == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.TYPE_ENUM:
        return rng.choice(
            [value.number for value in field.enum_type.values] + ([99] if not field.enum_type.is_closed else [])
        )
    low, high = _BITS.get(kind, (-(1 << 63), (1 << 63) - 1))
    value = rng.choice((rng.choice(INTEGERS), -rng.choice(INTEGERS), (old or 0) + rng.randint(-2, 2)))
    return min(max(value, low), high)


def of_message(kind: type[Message]) -> Callable[[bytes, Random], bytes]:
    """A change of a serialised message of this kind; of its bytes where it is none."""

    def change(data: bytes, rng: Random) -> bytes:
        if rng.random() < 0.2:
            return havoc(data, rng)
        try:
            held = kind.FromString(data)
        except Exception:  # it is no such message any more
            return havoc(data, rng)
        message(held, rng)
        return held.SerializePartialToString()

    return change


def archive(data: bytes, rng: Random, change: Callable[[bytes, Random], bytes] = havoc) -> bytes:
    """Change a ZIP archive: a member's content, name or place; its bytes where it is none."""
    if rng.random() < 0.3:
        return havoc(data, rng)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as held:
            members = [(one.filename, held.read(one)) for one in held.infolist()][:50]
    except Exception:  # damaged by an earlier change
        return havoc(data, rng)
    if members:
        at = rng.randrange(len(members))
        name, content = members[at]
        what = rng.randrange(5)
        if what == 0:
            members.append((rng.choice((name, rng.choice(TEXTS)[:1000])), content))
        elif what == 1:
            del members[at]
        elif what == 2:
            members[at] = (rng.choice(TEXTS)[:1000], content)
        else:
            members[at] = (name, change(content, rng))
    out = io.BytesIO()
    way = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", way) as held:
        warnings.simplefilter("ignore")  # of a name that is there twice
        for name, content in members:
            held.writestr(zipfile.ZipInfo(name.encode(errors="replace").decode() or "x"), content)
    return out.getvalue()
