"""Opening a bundle on the host."""

from __future__ import annotations

from pathlib import Path

from hil.bundles import Bundle
from hil.bundles.signature import public_keys, verify


def open_bundle(path: Path, key: Path | None = None) -> Bundle:
    """A bundle whose signature, where it has one, is right.

    Args:
        path: its file.
        key: a file of public keys, one of which must have signed it; None takes any signature, or none.

    Raises:
        UsageError: as :meth:`Bundle.open`, the signature is wrong, or not one of those keys'.
    """
    bundle = Bundle.open(path)
    if key is not None or bundle.head.signature:
        verify(bundle.head, public_keys(key) if key is not None else None)
    return bundle
