"""Detect file formats by the first bytes."""

from __future__ import annotations


def is_bytecode(head: bytes) -> bool:
    """Return True for MLIR bytecode."""
    return head.startswith(b"ML\xefR")


def is_vmfb(head: bytes) -> bool:
    """Return True for an IREE module: a flatbuffer, by default in a ZIP archive."""
    return b"IREE" in head[4:16]


def is_tflite(head: bytes) -> bool:
    """Return True for a TFLite flatbuffer."""
    return head[4:8] == b"TFL3"


def is_pte(head: bytes) -> bool:
    """Return True for an ExecuTorch program, with or without test cases.

    The digits in the mark are the schema version.
    """
    return head[4:6] in (b"ET", b"BP") and head[6:8].isdigit()


def is_hilb(head: bytes) -> bool:
    """Return True for a hil bundle."""
    return head.startswith(b"\x89HILB")


def has_no_mark(head: bytes) -> bool:
    """Return False for formats that only the file name identifies."""
    return False
