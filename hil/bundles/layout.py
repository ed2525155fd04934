"""How a ``.hilb`` file is laid out, and reading one that may have been made to do harm.

::

    0    magic, 8 bytes; format version, uint32; flags, uint32 (1: signed)
    16   size of the file, uint64; size of the manifest, uint64
    32   BLAKE3 digest of the manifest
    64   ed25519 public key and, at 96, signature; zeros where there is none; at 160 32 zeros
    192  the manifest: canonical JSON (sorted keys, no spaces, ASCII), zeros up to the next multiple of 64
    ...  the blobs, in the manifest's order, each followed by zeros up to the next multiple of 64

Numbers are little-endian. Blobs have no offsets, each begins where the one before it ends, so none can overlap or lie
outside the file; and every byte is one that some check covers. The same content gives the same bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from hil.core.digest import check, digest_of
from hil.errors import UsageError

MAGIC = b"\x89HILB\r\n\x1a"
VERSION = 1
ALIGN = 64
HEADER_BYTES = 192
MAX_FILE_BYTES = 64 << 30
MAX_MANIFEST_BYTES = 16 << 20
MAX_HEAD_BYTES = HEADER_BYTES + MAX_MANIFEST_BYTES + ALIGN
MAX_BLOBS = 1_000_000
_SIGNED = 1
_HEADER = struct.Struct("<8sIIQQ32s32s64s32s")
_BROKEN = "get the file again, or make it again: hil bundle create"


@dataclass(frozen=True)
class Head:
    """Header and manifest."""

    size: int  # of the whole file, in bytes
    manifest: bytes
    # public_key, signature: of ed25519, 32 and 64 bytes; b"" where it is not signed. Nobody has checked them.
    public_key: bytes = b""
    signature: bytes = b""

    def to_bytes(self) -> bytes:
        """As they stand at the beginning of a file, with the zeros after the manifest."""
        signed, digest = _SIGNED if self.signature else 0, _digest_bytes(self.manifest)
        sizes = self.size, len(self.manifest)
        header = _HEADER.pack(MAGIC, VERSION, signed, *sizes, digest, self.public_key, self.signature, b"")
        return (header + self.manifest).ljust(self.data_offset, b"\0")

    @property
    def data_offset(self) -> int:
        """Where the first blob begins."""
        return aligned(HEADER_BYTES + len(self.manifest))

    @property
    def digest(self) -> str:
        """The manifest's digest: of all that the bundle holds, for the manifest holds the digests of the rest."""
        return digest_of(self.manifest)

    def document(self) -> dict[str, Any]:
        """The manifest as JSON. Raises UsageError: it is none, or not written as it has to be."""
        try:
            document = json.loads(self.manifest)
            canonical = canonical_json(document)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the manifest is no JSON: {error}", hint=_BROKEN) from error
        # What reads differently from how it is written (a key twice, 1e999) could mean two things.
        if canonical != self.manifest or not isinstance(document, dict):
            raise UsageError("the manifest is not written as canonical JSON", hint=_BROKEN)
        return document


def aligned(size: int) -> int:
    """A size rounded up to where the next part may start."""
    return (size + ALIGN - 1) // ALIGN * ALIGN


def canonical_json(document: Any) -> bytes:
    """A document in the one way in which manifests are written.

    Raises:
        ValueError: JSON has no word for what is in it.
    """
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def map_file(path: Path) -> memoryview:
    """A bundle's bytes, memory-mapped.

    Raises:
        UsageError: there is no such file, it cannot be read, is empty, or larger than any bundle may be.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block
        try:
            found = os.fstat(descriptor)
            if not S_ISREG(found.st_mode):
                raise UsageError(f"{path} is no plain file", hint="name a .hilb file")
            if found.st_size > MAX_FILE_BYTES:
                raise UsageError(f"{path} has {found.st_size} bytes, {MAX_FILE_BYTES} are allowed")
            return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise UsageError(f"no such file: {path}") from error
    except ValueError as error:  # mmap's word for an empty file
        raise UsageError(f"{path} is no bundle: it is empty", hint=_BROKEN) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


def read_head(view: memoryview) -> Head:
    """Header and manifest of a file, or of that beginning of one which :meth:`Head.to_bytes` gives.

    Raises:
        UsageError: it is no bundle, of another version, cut off or damaged.
    """
    if view.nbytes < HEADER_BYTES or view[: len(MAGIC)] != MAGIC:
        raise UsageError("this is no bundle: it does not begin as a .hilb file does", hint=_BROKEN)
    _, version, flags, size, manifest_size, digest, public_key, signature, rest = _HEADER.unpack(view[:HEADER_BYTES])
    if version != VERSION:
        raise UsageError(
            f"the bundle is of version {version}, this hil reads version {VERSION}", hint="use the hil that made it"
        )
    if manifest_size > MAX_MANIFEST_BYTES:
        raise UsageError(f"the manifest has {manifest_size} bytes, {MAX_MANIFEST_BYTES} are allowed", hint=_BROKEN)
    manifest = bytes(view[HEADER_BYTES : HEADER_BYTES + manifest_size])
    if len(manifest) != manifest_size:
        raise UsageError("the bundle is cut off in its manifest", hint=_BROKEN)
    if _digest_bytes(manifest) != digest:
        raise UsageError("the manifest is damaged: its digest is another", hint=_BROKEN)
    signed = flags == _SIGNED
    head = Head(size, manifest, public_key if signed else b"", signature if signed else b"")
    if flags not in (0, _SIGNED) or any(rest) or view[: head.data_offset] != head.to_bytes():
        raise UsageError("the bundle's header is damaged", hint=_BROKEN)
    return head


def split(view: memoryview, head: Head, table: Sequence[tuple[str, int]]) -> list[memoryview]:
    """A file's blobs, each looked at whole.

    Args:
        table: digest and size of each blob.

    Raises:
        UsageError: the file is cut off, too long, or damaged.
    """
    if len(table) > MAX_BLOBS:
        raise UsageError(f"the bundle has {len(table)} blobs, {MAX_BLOBS} are allowed", hint=_BROKEN)
    needed = head.data_offset + sum(aligned(size) for _, size in table)
    if view.nbytes != head.size or needed != head.size:
        raise UsageError(
            f"the bundle is cut off or was added to: it has {view.nbytes} bytes and should have {needed}", hint=_BROKEN
        )
    blobs = []
    at = head.data_offset
    for number, (digest, size) in enumerate(table):
        blob, padding = view[at : at + size], view[at + size : at + aligned(size)]
        if digest_of(blob) != check(digest) or any(padding):
            raise UsageError(f"blob {number} of the bundle is damaged: its digest is another", hint=_BROKEN)
        blobs.append(blob)
        at += aligned(size)
    return blobs


def pieces(head: Head, blobs: Sequence[memoryview]) -> Iterator[bytes | memoryview]:
    """What a file holds, in order."""
    yield head.to_bytes()
    for blob in blobs:
        yield blob
        yield b"\0" * (aligned(blob.nbytes) - blob.nbytes)


def _digest_bytes(data: bytes) -> bytes:
    return bytes.fromhex(digest_of(data).partition(":")[2])
