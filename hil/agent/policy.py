"""Which programs an agent loads: any, or only those of bundles that somebody trusted has signed.

A program out of a signed bundle comes with one file more: the bundle's header and manifest, which name the program's
other files by their digests and carry the signature. The agent needs nothing else to know that each byte is signed.
"""

from __future__ import annotations

from dataclasses import dataclass

from hil.agent.store import BlobStore
from hil.bundles.content import program_files
from hil.bundles.layout import MAX_HEAD_BYTES, read_head
from hil.bundles.seal import SEAL
from hil.bundles.signature import verify
from hil.errors import LoadFailed, RunFailed, UsageError
from hil.protocol.v1 import agent_pb2 as pb

_HINT = "sign the bundle with a trusted key (hil bundle create --sign KEY) and run it with hil bundle run"


@dataclass(frozen=True)
class Policy:
    """Programs of bundles signed by one of these keys, and nothing else.

    Attributes:
        trusted: ed25519 public keys.
    """

    trusted: tuple[bytes, ...]

    def check_load(self, request: pb.LoadRequest, store: BlobStore) -> None:
        """Refuse a program that no trusted bundle holds just so.

        Raises:
            LoadFailed: it is refused.
        """
        files = {file.name: file.digest for file in request.files}
        seal = files.pop(SEAL, "")
        if not seal:
            raise LoadFailed("this board runs programs of signed bundles only, and this one is not signed", hint=_HINT)
        try:
            with store.path(seal).open("rb") as file:
                head = read_head(memoryview(file.read(MAX_HEAD_BYTES)))
            verify(head, self.trusted)
            signed, main, runtime, methods = program_files(head.document())
        except UsageError as error:
            raise LoadFailed(f"this board runs programs of signed bundles only: {error.message}", hint=_HINT) from error
        asked = (files, request.main, request.runtime)
        if asked != (signed, main, runtime) or len(files) + 1 != len(request.files) or request.function not in methods:
            raise LoadFailed("this board runs programs of signed bundles only: this is not what was signed", hint=_HINT)

    def check_profile(self, tool: str) -> None:
        """Refuse a profiler that was sent here: it is a program that nobody signed.

        Raises:
            RunFailed: it is refused.
        """
        if tool:
            raise RunFailed(
                "this board runs programs of signed bundles only, and the profiler that was sent is not signed",
                hint="install the runtime's own profiler on the board",
            )
