"""Bundles that the C verifier and the Python reader must judge alike."""

from __future__ import annotations

import contextlib
import importlib.util
import struct
from collections.abc import Iterator
from pathlib import Path
from random import Random

from fuzzing import files
from fuzzing.engine import Attempt, Broken, Fuzzer, Tried

_WORDS = (
    b"1.0",
    b"-0",
    b"1e5",
    b"0.1",
    b"1e-05",
    b"\\u202e",
    b"\\ud83d\\ude00",
    b"\\u0041",
    b"\\n",
    b"null",
    b"[]",
    b"{}",
)


@contextlib.contextmanager
def _open(folder: Path) -> Iterator[Attempt]:
    from support.verifier_verdicts import verdicts

    with verdicts(folder) as asked:

        def attempt(data: bytes) -> Tried:
            message, difference = asked.compare(data)
            if difference:
                raise Broken(difference)
            return Tried(kinds=(message[:60],))

        yield attempt


def _mutate(data: bytes, rng: Random) -> bytes:
    """Change a bundle as its own fuzzer does, or its manifest as text; then set right what follows from that."""
    from hil.bundles.layout import HEADER_BYTES, Head, align_offset

    if rng.random() < 0.5 or len(data) < HEADER_BYTES:
        return files.change_bundle(data, rng)
    (count,) = struct.unpack_from("<Q", data, 24)
    text = bytearray(data[HEADER_BYTES : HEADER_BYTES + count])
    blobs = data[align_offset(HEADER_BYTES + count) :] if count < len(data) else b""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        cut = rng.choice((0, 0, 1, 2, rng.randint(0, 20)))
        text[at : at + cut] = rng.choice((rng.choice(_WORDS), bytes([rng.randrange(32, 127)]), b""))
    size = align_offset(HEADER_BYTES + len(text)) + len(blobs)
    return Head(size, bytes(text)).to_bytes() + blobs


def _seeds() -> list[bytes]:
    from support.hostile_bundles import made

    return [*files.bundles(), *made().values()]


FUZZER = Fuzzer(
    "verdicts",
    "bundles, .hilb, by the C verifier and the Python reader",
    _open,
    _seeds,
    _mutate,
    lacking=lambda: "" if importlib.util.find_spec("ziglang") else "ziglang is not installed",
)
