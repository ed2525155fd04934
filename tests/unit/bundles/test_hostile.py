"""Damaged or malicious files are rejected with one sentence, before any content is used."""

from __future__ import annotations

import copy
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bundle_files import bundle, case, control, digest_patched, forged, judge_controls

from hil.bundles import Bundle
from hil.bundles.controls import find_misfit
from hil.bundles.layout import MAX_FILE_BYTES, MAX_MANIFEST_BYTES
from hil.compare.control import measure_control
from hil.core.digest import digest_of
from hil.errors import UsageError


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Bundle:
    return bundle(tmp_path_factory.mktemp("bundle"), case(), case(1, rtol=0.5))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> bytes:
    """Return the bytes of a bundle file with one case."""
    folder = tmp_path_factory.mktemp("small")
    bundle(folder, case()).save(folder / "b.hilb")
    return (folder / "b.hilb").read_bytes()


@pytest.fixture(scope="module")
def raw(made, tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("raw") / "b.hilb"
    made.save(path)
    return path.read_bytes()


def refused(data: bytes, folder: Path) -> str:
    """Return the message of the error for a file."""
    path = folder / "hostile.hilb"
    path.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        Bundle.open(path)
    assert caught.value.exit_code == 2
    return caught.value.message


@pytest.mark.ci
def test_bundle_open_detects_every_flipped_byte(small, tmp_path):
    for at in range(len(small)):
        refused(small[:at] + bytes([small[at] ^ 0x41]) + small[at + 1 :], tmp_path)


@pytest.mark.ci
def test_bundle_open_handles_flipped_manifest_with_valid_digest(small, tmp_path):
    path = tmp_path / "hostile.hilb"
    (size,) = struct.unpack_from("<Q", small, 24)
    for at in range(192, 192 + size):
        path.write_bytes(digest_patched(small[:at] + bytes([small[at] ^ 1 << at % 8]) + small[at + 1 :]))
        try:
            opened = Bundle.open(path)
        except UsageError:
            continue
        # A different name, flag or tolerance is as valid as the original.
        assert next(iter(opened.methods[0].cases[0].inputs.values())).shape == (3, 2)


@pytest.mark.ci
def test_bundle_open_rejects_truncated_file(small, tmp_path):
    for size in range(0, len(small), 3):
        refused(small[:size], tmp_path)


@pytest.mark.parametrize("more", [b"\0", b"x" * 64, b"\0" * 4096])
def test_bundle_open_rejects_trailing_bytes(raw, tmp_path, more):
    assert "extra data" in refused(raw + more, tmp_path)


FORGERIES = {
    "a name that leads out": lambda d: d["program"]["files"][0].update(name="../main.bin"),
    "an absolute name": lambda d: d["program"]["files"][0].update(name="/etc/passwd"),
    "a name inside a name": lambda d: d["program"]["files"][0].update(name="a/../b"),
    "a name with a drive": lambda d: d["program"]["files"][0].update(name="c:main.bin"),
    "a name with backslashes": lambda d: d["program"]["files"][0].update(name="..\\main.bin"),
    "an empty name": lambda d: d["program"]["files"][0].update(name=""),
    "the folder itself": lambda d: d["program"]["files"][0].update(name="."),
    "a name with a line end": lambda d: d["program"]["files"][0].update(name="a\nb"),
    "a name with a NUL": lambda d: d["program"]["files"][0].update(name="a\0b"),
    "half a character": lambda d: d["program"]["files"][0].update(name="\ud800"),
    "an endless name": lambda d: d["program"]["files"][0].update(name="a" * 300),
    "a name of too many bytes": lambda d: d["program"]["files"][0].update(name="\u00e9" * 200),
    "the seal's name": lambda d: d["program"]["files"][0].update(name="hil:bundle"),
    "a file that is a folder too": lambda d: d["program"]["files"][1].update(name="main.bin/w"),
    "two files of one name": lambda d: d["program"]["files"][1].update(name="MAIN.bin"),
    "a runtime that is a command": lambda d: d["program"].update(runtime="x; reboot"),
    "a runtime of two words": lambda d: d["program"].update(runtime="iree none"),
    "a runtime that is an option": lambda d: d["program"].update(runtime="--force"),
    "no main file": lambda d: d["program"].update(main="other.bin"),
    "a terminal's escape in a method's name": lambda d: d["methods"][0].update(name="\x1b[2J"),
    "no method": lambda d: d.update(methods=[]),
    "a method twice": lambda d: d["methods"].append(copy.deepcopy(d["methods"][0])),
    "a case twice": lambda d: d["methods"][0]["cases"].append(copy.deepcopy(d["methods"][0]["cases"][0])),
    "a shape that needs more bytes": lambda d: _tensor(d).update(shape=[4, 2]),
    "a shape beyond all memory": lambda d: _tensor(d).update(shape=[1 << 40, 1 << 40]),
    "a shape whose product overflows": lambda d: _tensor(d).update(shape=[1 << 32, 1 << 32, 0]),
    "a negative shape": lambda d: _tensor(d).update(shape=[-3, -2]),
    "a shape of many dimensions": lambda d: _tensor(d).update(shape=[1] * 100),
    "a dimension that is a text": lambda d: _tensor(d).update(shape=["N", 2]),
    "a dimension that is true": lambda d: _tensor(d).update(shape=[True, 6]),
    "a dimension that is a fraction": lambda d: _tensor(d).update(shape=[3.0, 2]),
    "a shape that is not the method's": lambda d: _tensor(d).update(shape=[6]),
    "another dtype": lambda d: _tensor(d).update(dtype="int32"),
    "an unknown dtype": lambda d: _tensor(d).update(dtype="object"),
    "texts that are none": lambda d: _tensor(d).update(dtype="string"),
    "a blob that is not there": lambda d: _tensor(d).update(blob="blake3:" + "0" * 64),
    "a blob that is no digest": lambda d: _tensor(d).update(blob="../x"),
    "a case without a field": lambda d: d["methods"][0]["cases"][0].pop("rtol"),
    "a case with a field more": lambda d: d["methods"][0]["cases"][0].update(run="rm"),
    "a tolerance that cannot fail": lambda d: d["methods"][0]["cases"][0].update(rtol=7.0),
    "a tolerance that is a text": lambda d: d["methods"][0]["cases"][0].update(rtol="1"),
    "a tolerance that is true": lambda d: d["methods"][0]["cases"][0].update(atol=True),
    "an expected output less": lambda d: d["methods"][0]["cases"][0].update(outputs=[]),
    "a signature with one name twice": lambda d: d["methods"][0]["inputs"].append(d["methods"][0]["inputs"][0]),
    "a signature beyond all memory": lambda d: d["methods"][0]["inputs"][0].update(shape=[1 << 40, 1 << 40]),
    "a flag that is a number": lambda d: d["program"].update(flags=[1]),
    "a blob that nothing names": lambda d: d["program"]["files"].pop(1),
    "a blob twice": lambda d: d["blobs"].append(d["blobs"][0]),
    "a blob of another size": lambda d: d["blobs"][0].update(size=1 << 40),
    "a blob of a size that is true": lambda d: d["blobs"][0].update(size=True),
    "a blob with another digest": lambda d: d["blobs"][0].update(digest="blake3:" + "0" * 64),
    "a blob with half a digest": lambda d: d["blobs"][0].update(digest="blake3:00"),
    "a list in place of an object": lambda d: d.update(program=[]),
    "something more": lambda d: d.update(more={}),
    "what made it, too deep": lambda d: d.update(made=_deep(100)),
    "no JSON": lambda d: b"{",
    "a key twice": lambda d: b'{"a":1,"a":1}',
    "spaces": lambda d: b'{"a": 1}',
    "a number that is none": lambda d: b"NaN",
    "a number without end": lambda d: b'{"a":' + b"9" * 100_000 + b"}",
    "brackets without end": lambda d: b"[" * 1_000_000,
    "objects without end": lambda d: b'{"a":' * 200_000,
}


def _tensor(document):
    return document["methods"][0]["cases"][0]["inputs"][0]


def _deep(levels):
    return {"a": _deep(levels - 1)} if levels else {}


@pytest.mark.parametrize("name", FORGERIES)
def test_bundle_open_rejects_forged_manifest(made, tmp_path, name):
    data = forged(made, lambda document: result if isinstance(result := FORGERIES[name](document), bytes) else None)
    tracemalloc.start()
    try:
        message = refused(data, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in message
    assert len(message) < 1000
    assert peak < 40 << 20


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data(), value=values)
@settings(max_examples=150)
def test_bundle_open_handles_any_value_in_manifest(made, tmp_path_factory, data, value):
    def change(document):
        place = document
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = data.draw(st.sampled_from(list(keys)))
            inner = place[key]
            if not isinstance(inner, (dict, list)) or not inner or data.draw(st.integers(0, 3)) == 0:
                place[key] = value
                return
            place = inner

    path = tmp_path_factory.getbasetemp() / "mutated.hilb"
    path.write_bytes(forged(made, change))
    try:
        opened = Bundle.open(path)
    except UsageError as error:
        assert "Traceback" not in str(error)
    else:
        assert opened.methods[0].cases[0].inputs["x"].shape == (3, 2)


@pytest.fixture(scope="module")
def controlled(tmp_path_factory) -> Bundle:
    return bundle(tmp_path_factory.mktemp("controlled"), case(6, control=control()))


def _control(document):
    return document["methods"][0]["cases"][0]["control"]["y"]


MISFITS = {
    "unknown arithmetic 'float9'": lambda c: c.update(arithmetic="float9"),
    "a deviation is not finite": lambda c: c.update(whole=["inf", "inf"]),
    "channels along axis 1, which is not a channel axis": lambda c: c["axes"].update({"1": [None]}),
    "channels along axis -1, which is not a channel axis": lambda c: c["axes"].update({"-1": [None]}),
    "base-16 exponent 999 is out of range": lambda c: c["sizes"].update({"999": [0.1, 0.1]}),
    "the control has values for 2 jumping elements, but counts 3": lambda c: c.update(jumping=3),
    "the control has values for 0 jumping elements, but counts 2": lambda c: c.update(jumps={}),
    "but counts -1": lambda c: c.update(jumps={}, jumping=-1),
    "out of range for 6 elements": lambda c: c["jumps"].update({"6": c["jumps"].pop("1")}),
    "out of range for 6 elements ": lambda c: c["jumps"].update({"-7": c["jumps"].pop("1")}),
    "different numbers of values": lambda c: c["jumps"]["1"].pop(),
}


@pytest.mark.parametrize("text", MISFITS)
def test_bundle_open_rejects_mismatched_control(controlled, tmp_path, text):
    data = forged(controlled, lambda document: MISFITS[text](_control(document)))
    message = refused(data, tmp_path)
    assert "method 'f', case 0 ('0'): invalid control of output 'y': " in message and text.strip() in message


def test_find_misfit_checks_channel_count_of_control(tmp_path):
    wide = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = measure_control("float16", "test", wide, [wide * np.float32(1.001)], [])
    assert found.axes.keys() == {1} and find_misfit(found, wide) == ""
    assert "4 channels along axis 1, the output 3x5 float32" in find_misfit(found, np.ones((3, 5), np.float32))
    assert "cannot have a control" in find_misfit(found, np.array(["text"], object))


@pytest.mark.parametrize("damaged", [{"whole": [-1.0, 1.0]}, {"whole": ["nan", 1.0]}, {"source": "\x1b[2J"}])
def test_bundle_open_rejects_damaged_control_fields(controlled, tmp_path, damaged):
    assert "control" in refused(forged(controlled, lambda document: _control(document).update(damaged)), tmp_path)


@given(data=st.data(), value=values | st.sampled_from(["inf", "nan", -1, 5, 1e308]))
@settings(max_examples=150)
def test_bundle_open_handles_any_value_in_control(controlled, tmp_path_factory, data, value):
    def change(document):
        place = _control(document)
        while True:
            key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place)))))
            if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.integers(0, 3)) == 0:
                place[key] = value
                return
            place = place[key]

    path = tmp_path_factory.getbasetemp() / "control.hilb"
    path.write_bytes(forged(controlled, change))
    try:
        opened = Bundle.open(path)
    except UsageError as error:
        assert "control" in error.message
    else:
        judge_controls(opened)


@given(st.binary(max_size=600))
def test_bundle_open_rejects_arbitrary_bytes(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.hilb"
    path.write_bytes(data)
    with pytest.raises(UsageError):
        Bundle.open(path)


def test_bundle_open_rejects_huge_manifest_by_declared_size(raw, tmp_path):
    data = raw[:24] + struct.pack("<Q", MAX_MANIFEST_BYTES + 1) + raw[32:]
    assert "are allowed" in refused(data, tmp_path)
    assert "truncated" in refused(raw[:24] + struct.pack("<Q", MAX_MANIFEST_BYTES) + raw[32:], tmp_path)


def test_bundle_open_rejects_oversized_file_without_reading(raw, tmp_path):
    path = tmp_path / "huge.hilb"
    path.write_bytes(raw[:16] + struct.pack("<Q", MAX_FILE_BYTES + 64) + raw[24:])
    os.truncate(path, MAX_FILE_BYTES + 64)  # a sparse file: no data is written
    with pytest.raises(UsageError, match="are allowed"):
        Bundle.open(path)
    path.unlink()


def test_bundle_open_reports_newer_version(raw, tmp_path):
    assert "version 9" in refused(raw[:8] + struct.pack("<I", 9) + raw[12:], tmp_path)


def test_bundle_open_rejects_invalid_bool_bytes(made, tmp_path):
    def change(document):
        spec = {"name": "x", "dtype": "bool", "shape": ["N", 8]}
        document["methods"][0]["inputs"][0] = spec
        for number, one in enumerate(document["methods"][0]["cases"]):
            one["inputs"][0].update(dtype="bool", shape=[3 - 2 * number, 8])

    assert "invalid bool bytes" in refused(forged(made, change), tmp_path)


@pytest.mark.parametrize("what", ["missing", "folder", "empty", "pipe", "zeros"])
def test_bundle_open_rejects_special_files(tmp_path, what):
    path = {"missing": tmp_path / "no.hilb", "folder": tmp_path, "zeros": Path("/dev/zero")}.get(what, tmp_path / what)
    if what == "empty":
        path.touch()
    if what == "pipe":
        os.mkfifo(path)
    with pytest.raises(UsageError, match=r"no such file|no plain file|is empty|cannot be read"):
        Bundle.open(path)


def test_bundle_tensors_are_read_only(made, raw, tmp_path):
    path = tmp_path / "b.hilb"
    path.write_bytes(raw)
    array = Bundle.open(path).methods[0].cases[0].inputs["x"]
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = np.float32(1)
    assert digest_of(path.read_bytes()) == digest_of(raw)
