"""Untrusted NumPy files."""

from __future__ import annotations

import io
import os
import socket
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hil.core.files import MAX_TEXT_BYTES, read_file, read_text, resolve_within
from hil.core.npy import Npz, parse_npy, read_npy
from hil.errors import UsageError


def npy(header: str, data: bytes = b"", version: int = 1) -> bytes:
    """Return a .npy file with the given header."""
    text = header.encode("latin-1")
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + data


def head(descr: str = "'<f4'", shape: str = "(2,)", fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


HOSTILE = {
    "huge": npy(head(shape="(1000000000000000000,)")),
    "huge product": npy(head(shape="(" + "999999999999999999, " * 60 + ")")),
    "huge times none": npy(head(shape="(0, " + "999999999999999999, " * 60 + ")")),
    "6000 digits": npy(head(shape=f"({'9' * 6000},)")),
    "nested tuples": npy(head(shape="(" * 3000 + ")" * 3000)),
    "nested signs": npy(head(shape="(" + "-" * 9000 + "1,)")),
    "nested deeper": npy("[" * 60000),
    "negative": npy(head(shape="(-2,)"), b"\0" * 8),
    "70 dimensions": npy(head(shape=f"({'1, ' * 70})"), b"\0" * 4),
    "65 dimensions": npy(head(shape=f"({'1, ' * 65})"), b"\0" * 4),
    "structured": npy(head("[('a', '<f4'), ('b', '<f4')]"), b"\0" * 16),
    "subarray": npy(head("('<f4', (2,))"), b"\0" * 16),
    "fields in a text": npy(head("'f4,f4'"), b"\0" * 16),
    "objects": npy(head("'|O'"), b"\0" * 16),
    "no bytes an element": npy(head("'|V0'", "(999999999999999,)")),
    "texts of no length": npy(head("'<U0'", "(999999999999999,)")),
    "unknown dtype": npy(head("'<q9'"), b"\0" * 16),
    "code": npy(head("__import__('os').abort()")),
    "two shapes": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'shape': [3], }", b"\0" * 8),
    "a field more": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'x': (1,), }", b"\0" * 8),
    "no shape": npy("{'descr': '<f4', 'fortran_order': False, }", b"\0" * 8),
    "header of 4 GiB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
    "version 9": b"\x93NUMPY\x09\x00\x10\x00" + b" " * 16,
    "cut in the magic": b"\x93NUM",
    "cut in the header": npy(head())[:40],
    "cut in the data": npy(head(), b"\0" * 7),
    "empty": b"",
    "pickle": b"\x80\x04N.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_npy_readers_reject_hostile_file(tmp_path: Path, name: str):
    path = tmp_path / "x.npy"
    path.write_bytes(HOSTILE[name])
    for mmap in (False, True):
        with pytest.raises(UsageError, match=r"is not a readable \.npy file"):
            read_npy(path, mmap=mmap)
    with pytest.raises(ValueError):
        parse_npy(HOSTILE[name])
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", HOSTILE[name])
    with Npz(tmp_path / "x.npz") as opened, pytest.raises(UsageError, match=r"is not a readable \.npz file: x: "):
        opened.read("x")


@pytest.mark.parametrize(
    "array",
    [
        np.float32(3),
        np.arange(6, dtype="<i8").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=">f4").reshape(2, 3)),
        np.zeros((0, 3), np.float16),
        np.array([["a", "longer"], ["", "ü"]]),
        np.array([True, False]),
        np.array([1 + 2j], np.complex64),
        np.zeros((1,) * 40, np.uint8),
        np.arange(4).astype(ml_dtypes.bfloat16).view("V2"),
    ],
    ids=str,
)
def test_npy_readers_match_numpy(tmp_path: Path, array: Any):
    np.save(tmp_path / "x.npy", array)
    np.savez_compressed(tmp_path / "x.npz", x=array)
    wanted = np.load(tmp_path / "x.npy")
    with Npz(tmp_path / "x.npz") as archive:
        unpacked = archive.read("x")
    for read in (read_npy(tmp_path / "x.npy"), read_npy(tmp_path / "x.npy", mmap=True), unpacked):
        assert (read.dtype, read.shape) == (wanted.dtype, wanted.shape)
        assert read.flags.f_contiguous == wanted.flags.f_contiguous
        assert read.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("version", [2, 3])
def test_parse_npy_accepts_headers_in_any_order_and_version(version: int):
    text = '{"shape": (2L,), "fortran_order": False, "descr": "<f4"}\n'
    assert parse_npy(npy(text, b"\0" * 8, version)).tolist() == [0, 0]


def bomb(path: Path, mib: int) -> None:
    """Write an archive of less than a MiB whose single array has the given number of MiB of zeros."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w", force_zip64=True) as out,
    ):
        out.write(npy(head("'|u1'", f"({mib << 20},)")))
        zeros = bytes(64 << 20)
        for _ in range(mib // 64):
            out.write(zeros)


def peak_of(code: str, *words: str) -> tuple[int, str]:
    """Run Python code in a process. Return its peak memory in MiB and its output."""
    high = "int(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])"
    code = f"{code}\nfrom pathlib import Path\nprint({high} // 1024)"
    ended = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120, check=True
    )
    *said, peak = ended.stdout.splitlines()
    return int(peak), "\n".join(said)


@pytest.mark.ci
def test_npz_rejects_zip_bomb_before_unpacking(tmp_path: Path):
    bomb(tmp_path / "x.npz", 512)
    assert (tmp_path / "x.npz").stat().st_size < 2 << 20
    code = (
        "import sys\nfrom hil.controller.models.inputs import make_inputs\n"
        "from hil.controller.storage.tensor_files import load_npz\n"
        "from hil.core.tensors import TensorSpec\nfrom pathlib import Path\nfrom hil.errors import UsageError\n"
        "for specs in ([TensorSpec('x', 'float32', (4,))], [TensorSpec('x', 'uint8', ('N',))]):\n"
        "  for text in (sys.argv[1], f'x={sys.argv[1]}:x', f'x={sys.argv[1]}'):\n"
        "    try: make_inputs(specs, [text])\n"
        "    except UsageError as error: print(error.message)\n"
        "try: load_npz(Path(sys.argv[1]))\n"
        "except UsageError as error: print(error.message)\n"
    )
    peak, said = peak_of(code, str(tmp_path / "x.npz"))
    lines = said.splitlines()
    assert len(lines) == 7 and peak < 300, said
    assert all("input 'x': expected 4 float32, got 536870912 uint8" in line for line in lines[:3])
    assert all("x: unpacks to 536870912 bytes, much more than the archive has" in line for line in lines[3:])


@pytest.mark.ci
def test_npz_limits_total_unpacked_size(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            archive.writestr(f"{number}.npy", npy(head("'|u1'", f"({100 << 20},)"), bytes(100 << 20)))
    with Npz(tmp_path / "x.npz") as opened:
        assert opened.read("0").nbytes == opened.read("1").nbytes == 100 << 20
        with pytest.raises(UsageError, match="2: unpacks to"):
            opened.read("2")
        assert opened.read("2", lambda *_: True).nbytes == 100 << 20


def test_npz_rejects_damaged_or_unusual_archive(tmp_path: Path, recwarn: Any):
    whole = npy(head(), b"\0" * 8)

    def written(*names: str, packing: int = zipfile.ZIP_STORED) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", packing) as archive:
            for name in names:
                archive.writestr(name, whole)
        return out.getvalue()

    good = written("x.npy")
    encrypted = bytearray(good)
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        encrypted[encrypted.index(signature) + offset] |= 1
    flipped = bytearray(written("x.npy"))
    flipped[flipped.index(b"\x93NUMPY") + len(whole) - 1] ^= 1
    cases = {
        "duplicate": (written("x.npy", "x.npy"), "duplicate array 'x.npy'"),
        "text": (written("x.txt"), "is not an array"),
        "encrypted": (bytes(encrypted), "encrypted"),
        "lzma": (written("x.npy", packing=zipfile.ZIP_LZMA), "unsupported compression"),
        "checksum": (bytes(flipped), "CRC"),
        "cut": (good[: len(good) // 2], "not a zip"),
        "many": (written(*(f"{number}.npy" for number in range(10_001))), "10000 are allowed"),
        "empty": (b"", "not a zip"),
        "npy": (whole, "not a zip"),
    }
    for name, (data, words) in cases.items():
        path = tmp_path / f"{name}.npz"
        path.write_bytes(data)
        with pytest.raises(UsageError, match=f"is not a readable .npz file: .*{words}"), Npz(path) as archive:
            archive.read("x")


def test_make_inputs_rejects_sparse_file_without_reading(tmp_path: Path):
    (tmp_path / "x.npy").write_bytes(npy(head("'|u1'", f"({1 << 40},)")))
    os.truncate(tmp_path / "x.npy", (1 << 40) + 200)
    os.truncate(os.open(tmp_path / "x.bin", os.O_RDWR | os.O_CREAT), 1 << 40)
    code = (
        "import sys\nfrom hil.controller.models.inputs import make_inputs\n"
        "from hil.core.tensors import TensorSpec\n"
        "from hil.errors import UsageError\n"
        "for text in sys.argv[1:]:\n"
        "  try: make_inputs([TensorSpec('x', 'float32', (4,))], [text])\n"
        "  except UsageError as error: print(error.message)\n"
    )
    peak, said = peak_of(code, str(tmp_path / "x.npy"), f"4xf32=@{tmp_path}/x.bin", "99999999999999xf32", "x=9" * 2)
    assert len(said.splitlines()) == 4 and peak < 300, said


def test_file_readers_reject_special_files(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket"))
    odd = {tmp_path / "fifo": "a named pipe", tmp_path / "socket": "a socket", tmp_path: "a folder"}
    odd |= {Path("/dev/zero"): "a device", Path("/dev/stdin\0"): "invalid file name"}
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    odd[tmp_path / "link"] = "a named pipe"
    for path, words in odd.items():
        for read in (read_npy, Npz, read_file, read_text):
            with pytest.raises(UsageError, match=words):
                read(path)
    listening.close()


def test_read_text_enforces_size_limit(tmp_path: Path):
    (tmp_path / "big").write_bytes(b"")
    os.truncate(tmp_path / "big", MAX_TEXT_BYTES + 1)
    with pytest.raises(UsageError, match="are allowed"):
        read_text(tmp_path / "big")


def test_within_rejects_links_out_of_directory(tmp_path: Path):
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "file").write_text("")
    (tmp_path / "secret").write_text("")
    for name, target in {"ok": "file", "out": "../secret", "far": "/etc/passwd", "round": "round"}.items():
        (inside / name).symlink_to(target)
    assert resolve_within(inside, inside / "ok") == inside / "ok"
    for name in ("out", "far", "round"):
        with pytest.raises(UsageError):
            resolve_within(inside, inside / name)
