"""ed25519 signatures of bundles, by keys as OpenSSH and OpenSSL keep them.

What is signed is the manifest, byte for byte, after a prefix of our own (so that no signature made for something else
fits). The manifest holds the digest of every other part: program files, inputs, expected outputs. On its way to a board
a signed bundle's program has one file more, which proves the others (:func:`sealed`).

The package `cryptography`, which does the arithmetic, is imported on first use; a board needs it only where it checks
signatures.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil.bundles.layout import Head
from hil.core.digest import digest_of
from hil.core.files import MAX_TEXT_BYTES, read_file
from hil.core.results import Artifact
from hil.errors import UsageError

_CONTEXT = b"hil bundle manifest 1\0"
_KIND = b"ssh-ed25519"
_MAKE = "ssh-keygen -t ed25519 -N '' -f signing_key makes one"
# The bundle's header and manifest, among the files of its program. No program's own file can have this name: a manifest
# takes none with a colon.
SEAL = "hil:bundle"


def fingerprint(public_key: bytes) -> str:
    """What ``ssh-keygen -l`` calls a key: ``SHA256:...``."""
    blob = b"".join(struct.pack(">I", len(part)) + part for part in (_KIND, public_key))
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def sign(head: Head, key: Path) -> Head:
    """Header and manifest with a signature.

    Args:
        key: file of a private ed25519 key without a passphrase, in OpenSSH's form or as PEM.

    Raises:
        UsageError: the file holds no such key, or `cryptography` is not installed.
    """
    private = _private_key(key)
    signature = private.sign(_CONTEXT + head.manifest)
    return Head(head.size, head.manifest, private.public_key().public_bytes_raw(), signature)


def verify(head: Head, trusted: Sequence[bytes] | None = None) -> str:
    """Check a bundle's signature; returns the fingerprint of the key that made it.

    Args:
        trusted: public keys (:func:`public_keys`) of which it must be one; None takes any key: then the check says only
            that the file is as its signer left it.

    Raises:
        UsageError: it is not signed, not by one of these keys, the signature is wrong, or `cryptography` is not
            installed.
    """
    if not head.signature:
        raise UsageError("the bundle is not signed", hint="hil bundle create --sign KEY signs one")
    by = fingerprint(head.public_key)
    if trusted is not None and head.public_key not in trusted:
        known = ", ".join(map(fingerprint, trusted)) or "none"
        raise UsageError(f"the bundle is signed by {by}, which is not trusted here", hint=f"trusted: {known}")
    from_raw = _cryptography().hazmat.primitives.asymmetric.ed25519.Ed25519PublicKey.from_public_bytes
    from cryptography.exceptions import InvalidSignature

    try:
        from_raw(head.public_key).verify(head.signature, _CONTEXT + head.manifest)
    except (InvalidSignature, ValueError) as error:
        raise UsageError(
            f"the bundle's signature is not one that {by} made of it", hint="get the file again from who signed it"
        ) from error
    return by


def public_keys(path: Path) -> tuple[bytes, ...]:
    """The ed25519 keys in a file: one PEM key, or OpenSSH public keys, a line each (empty lines and # are passed over).

    Raises:
        UsageError: the file cannot be read, or holds anything else, or nothing.
    """
    serialization = _cryptography().hazmat.primitives.serialization
    data = _read(path)
    if data.lstrip().startswith(b"-----BEGIN"):
        return (_raw(path, 1, serialization.load_pem_public_key, data),)
    lines = [(number, line.strip()) for number, line in enumerate(data.splitlines(), 1)]
    found = tuple(
        _raw(path, number, serialization.load_ssh_public_key, line)
        for number, line in lines
        if line and not line.startswith(b"#")
    )
    if not found:
        raise UsageError(f"{path} holds no key", hint="one OpenSSH public key a line: ssh-ed25519 AAAA... name")
    return found


def _raw(path: Path, line: int, load: Any, data: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = load(data)
    except Exception as error:  # ValueError, UnsupportedAlgorithm and more: each says it in its own way
        raise UsageError(f"{path}:{line} is no public key: {error}", hint=_MAKE) from error
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{path}:{line} is no ed25519 key", hint=_MAKE)
    return key.public_bytes_raw()


def _private_key(path: Path) -> Any:
    serialization = _cryptography().hazmat.primitives.serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    data = _read(path)
    openssh = b"OPENSSH PRIVATE KEY" in data
    load = serialization.load_ssh_private_key if openssh else serialization.load_pem_private_key
    try:
        key = load(data, password=None)
    except Exception as error:
        raise UsageError(
            f"{path} is no private key that can be used: {error}",
            hint=f"an ed25519 key without a passphrase: {_MAKE}",
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} is no ed25519 key", hint=_MAKE)
    return key


def _read(path: Path) -> bytes:
    try:
        return read_file(path, MAX_TEXT_BYTES)
    except OSError as error:
        raise UsageError(f"the key {path} cannot be read: {error.strerror}") from error


def _cryptography() -> Any:
    try:
        import cryptography.hazmat.primitives.asymmetric.ed25519
        import cryptography.hazmat.primitives.serialization
    except ImportError as error:
        raise UsageError(
            "signatures need the Python package cryptography, which is not installed here",
            hint="pip install cryptography",
        ) from error
    return cryptography


def sealed(program: Artifact, head: Head, folder: Path) -> Artifact:
    """The program with the bundle's header and manifest as one file more, where it is signed; else as it is."""
    if not head.signature:
        return program
    data = head.to_bytes()
    path = folder / "seal"
    path.write_bytes(data)
    return replace(program, files={**program.files, SEAL: path}, digests={**program.digests, SEAL: digest_of(data)})
