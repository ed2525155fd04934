"""Define the layout of ``.hilb`` files, and read untrusted files.

::

    0    magic, 8 bytes; format version, uint32; flags, uint32 (1: signed)
    16   size of the file, uint64; size of the manifest, uint64
    32   BLAKE3 digest of the manifest
    64   ed25519 public key and, at 96, signature; zeros if unsigned; at 160 32 zeros
    192  the manifest: canonical JSON (sorted keys, no spaces, ASCII), zeros up to the next multiple of 64
    ...  the blobs, in the manifest's order, each followed by zeros up to the next multiple of 64

Numbers are little-endian. The file stores no offsets: each blob starts after the previous blob. So blobs cannot overlap
or exceed the file. Readers check every byte. Equal content gives equal bytes.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.core.digest import check, digest_of
from hil.core.files import MAX_MODEL_BYTES, FileReader, suggest_path
from hil.errors import UnreadableFile, UsageError

MAGIC = b"\x89HILB\r\n\x1a"
VERSION = 1
ALIGN = 64
HEADER_BYTES = 192
MAX_FILE_BYTES = 64 << 30
MAX_MANIFEST_BYTES = 16 << 20
MAX_HEAD_BYTES = HEADER_BYTES + MAX_MANIFEST_BYTES + ALIGN
MAX_BLOBS = 1_000_000
MAX_SHARED_BYTES = 4 << 30
_SIGNED = 1
_HEADER = struct.Struct("<8sIIQQ32s32s64s32s")
_BROKEN = "copy the file from its source, or create it: hil bundle create"


class CaseBlobs(dict[str, memoryview]):
    """Blobs by digest, with a limit on the total size of all cases.

    The limit is necessary because a small file may refer to the same blob in many cases.
    """

    def __init__(self, blobs: Mapping[str, memoryview], file_bytes: int) -> None:
        super().__init__(blobs)
        self._left = 4 * file_bytes + MAX_SHARED_BYTES

    def spend(self, size: int) -> bool:
        """Subtract a tensor's size from the remaining bytes. Return False if the limit is exceeded."""
        self._left -= size
        return self._left >= 0


@dataclass(frozen=True)
class Head:
    """Header and manifest."""

    size: int  # size of the whole file in bytes
    manifest: bytes
    # public_key, signature: ed25519, 32 and 64 bytes, not verified; b"" if unsigned.
    public_key: bytes = b""
    signature: bytes = b""

    def to_bytes(self) -> bytes:
        """Return the first bytes of the file: header, manifest and padding."""
        signed, digest = _SIGNED if self.signature else 0, _digest_bytes(self.manifest)
        sizes = self.size, len(self.manifest)
        header = _HEADER.pack(MAGIC, VERSION, signed, *sizes, digest, self.public_key, self.signature, b"")
        return (header + self.manifest).ljust(self.data_offset, b"\0")

    @property
    def data_offset(self) -> int:
        """Offset of the first blob."""
        return align_offset(HEADER_BYTES + len(self.manifest))

    @property
    def digest(self) -> str:
        """Digest of the manifest. It covers the whole bundle, because the manifest contains all other digests."""
        return digest_of(self.manifest)

    def parse_document(self) -> dict[str, Any]:
        """Parse the manifest. Raises UsageError if the manifest is not canonical JSON."""
        try:
            document = json.loads(self.manifest)
            canonical = encode_canonical_json(document)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the manifest is not JSON: {error}", hint=_BROKEN) from error
        # A manifest that parses differently from its text (duplicate key, 1e999) would be ambiguous.
        if canonical != self.manifest or not isinstance(document, dict):
            raise UsageError("the manifest is not canonical JSON", hint=_BROKEN)
        return document


def align_offset(size: int) -> int:
    """Round a size up to the alignment."""
    return (size + ALIGN - 1) // ALIGN * ALIGN


def encode_canonical_json(document: Any) -> bytes:
    """Return a document as canonical JSON.

    Raises:
        ValueError: JSON cannot represent a value.
    """
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@contextlib.contextmanager
def open_reader(path: Path) -> Iterator[FileReader]:
    """Open a bundle's file. Read errors inside the context also become UsageError.

    Raises:
        UsageError: the file is missing, unreadable, empty, or exceeds the size limit.
    """
    try:
        with FileReader(path) as reader:
            if not reader.size:
                raise UsageError(f"{path} is not a bundle: the file is empty", hint=_BROKEN)
            # Limit the size, because all blobs are read into memory.
            if reader.size > (most := min(MAX_FILE_BYTES, MAX_MODEL_BYTES)):
                raise UsageError(f"{path} has {reader.size} bytes, at most {most} are allowed")
            yield reader
    except FileNotFoundError as error:
        raise UsageError(f"no such file: {path}", hint=suggest_path(path).rstrip()) from error
    except OSError as error:
        raise UnreadableFile(
            f"{path} cannot be read: {error.strerror or error}", reason=error.strerror or str(error)
        ) from error


def read_head(view: memoryview) -> Head:
    """Parse the header and manifest of a file, or of the bytes from :meth:`Head.to_bytes`.

    Raises:
        UsageError: the data is not a bundle, has another version, or is truncated or damaged.
    """
    if view.nbytes < HEADER_BYTES or view[: len(MAGIC)] != MAGIC:
        raise UsageError("the file is not a bundle: missing .hilb signature", hint=_BROKEN)
    _, version, flags, size, manifest_size, digest, public_key, signature, rest = _HEADER.unpack(view[:HEADER_BYTES])
    if version != VERSION:
        raise UsageError(
            f"unsupported bundle version {version}: this hil reads version {VERSION}",
            hint="use the version of hil that created the bundle",
        )
    if manifest_size > MAX_MANIFEST_BYTES:
        raise UsageError(
            f"the manifest has {manifest_size} bytes, at most {MAX_MANIFEST_BYTES} are allowed", hint=_BROKEN
        )
    manifest = bytes(view[HEADER_BYTES : HEADER_BYTES + manifest_size])
    if len(manifest) != manifest_size:
        raise UsageError("the bundle is truncated in the manifest", hint=_BROKEN)
    if _digest_bytes(manifest) != digest:
        raise UsageError("the manifest is corrupt: digest mismatch", hint=_BROKEN)
    signed = flags == _SIGNED
    head = Head(size, manifest, public_key if signed else b"", signature if signed else b"")
    if flags not in (0, _SIGNED) or any(rest) or view[: head.data_offset] != head.to_bytes():
        raise UsageError("the bundle's header is corrupt", hint=_BROKEN)
    return head


def read_blobs(reader: FileReader, head: Head, table: Sequence[tuple[str, int]]) -> dict[str, memoryview]:
    """Read a file's blobs by digest, with verified digests.

    Args:
        table: digest and size of each blob.

    Raises:
        UsageError: the file is truncated, overlong, or damaged.
    """
    if len(table) > MAX_BLOBS:
        raise UsageError(f"the bundle has {len(table)} blobs, at most {MAX_BLOBS} are allowed", hint=_BROKEN)
    needed = head.data_offset + sum(align_offset(size) for _, size in table)
    if reader.size != head.size or needed != head.size:
        raise UsageError(
            f"the bundle is truncated or has extra data: size {reader.size} bytes, expected {needed}", hint=_BROKEN
        )
    blobs = {}
    at = head.data_offset
    for number, (digest, size) in enumerate(table):
        view = reader.read(at, align_offset(size))
        blob, padding = view[:size], view[size:]
        if digest_of(blob) != check(digest) or any(padding):
            raise UsageError(f"blob {number} of the bundle is corrupt: digest mismatch", hint=_BROKEN)
        blobs[digest] = blob
        at += view.nbytes
    return blobs


def iter_pieces(head: Head, blobs: Sequence[memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the file's content in order."""
    yield head.to_bytes()
    for blob in blobs:
        yield blob
        yield b"\0" * (align_offset(blob.nbytes) - blob.nbytes)


def _digest_bytes(data: bytes) -> bytes:
    return bytes.fromhex(digest_of(data).partition(":")[2])
