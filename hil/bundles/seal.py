"""A signed bundle's program on its way to a board: its files, and one more that proves them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hil.bundles.layout import Head
from hil.core.artifacts import Artifact
from hil.core.digest import digest_of

# The bundle's header and manifest, among the files of its program. No program's own file can have this name: a manifest
# takes none with a colon.
SEAL = "hil:bundle"


def sealed(program: Artifact, head: Head, folder: Path) -> Artifact:
    """The program with the bundle's header and manifest as one file more, where it is signed; else as it is.

    Args:
        program: of the bundle.
        head: of the bundle.
        folder: where the file is written.
    """
    if not head.signature:
        return program
    data = head.to_bytes()
    path = folder / "seal"
    path.write_bytes(data)
    return replace(program, files={**program.files, SEAL: path}, digests={**program.digests, SEAL: digest_of(data)})
