"""What a file is by its first bytes, whatever its name."""

from __future__ import annotations


def is_bytecode(head: bytes) -> bool:
    """Whether a file that begins with these bytes is MLIR's bytecode."""
    return head.startswith(b"ML\xefR")


def is_vmfb(head: bytes) -> bool:
    """Whether a file that begins with these bytes is a module of IREE's: a flatbuffer, by default in a ZIP archive."""
    return b"IREE" in head[4:16]


def is_tflite(head: bytes) -> bool:
    """Whether a file that begins with these bytes is a flatbuffer of TFLite's."""
    return head[4:8] == b"TFL3"


def is_pte(head: bytes) -> bool:
    """Whether it is a program of ExecuTorch's, by itself or with test cases; the digits are the schema's version."""
    return head[4:6] in (b"ET", b"BP") and head[6:8].isdigit()


def is_hilb(head: bytes) -> bool:
    """Whether it is a bundle of hil's."""
    return head.startswith(b"\x89HILB")


def has_no_mark(head: bytes) -> bool:
    """No: files of this kind begin as others do, and their name tells them."""
    return False
