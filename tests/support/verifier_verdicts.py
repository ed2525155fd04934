"""Results of the C verifier and the Python reader for a bundle: accepted or refused."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hil.bundles import Bundle
from hil.controller.workloads.bundles import verifier
from hil.errors import UsageError

_PROGRAM = Path(__file__).parents[1] / "fuzzing" / "verdicts.c"
# Messages of the C verifier for features that only the Python reader supports.
_UNSUPPORTED = ("a dtype that this verifier does not support", "this verifier supports tolerances only")


class Verdicts:
    """Check bundles with both readers. A message gives the reason of a refusal; "" means that the reader accepts the
    bundle.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self._path = folder / "asked.hilb"

    def of_verifier(self, data: bytes) -> str:
        """Return the C verifier's message."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(struct.pack("<Q", len(data)) + data)
        self._process.stdin.flush()
        line = self._process.stdout.readline().decode(errors="replace").rstrip("\n")
        assert line[:1] in ("0", "1"), f"the verifier ended: {self._process.poll()}"
        return line[2:]

    def of_reader(self, data: bytes) -> str:
        """Return the Python reader's message."""
        self._path.write_bytes(data)
        try:
            Bundle.open(self._path)
        except UsageError as error:
            return error.message
        return ""

    def compare(self, data: bytes) -> tuple[str, str]:
        """Return the C verifier's message, and the difference between the readers.

        The difference is "" if they agree, or if the C verifier reports an unsupported feature.
        """
        by_reader, by_verifier = self.of_reader(data), self.of_verifier(data)
        if bool(by_reader) == bool(by_verifier) or any(text in by_verifier for text in _UNSUPPORTED):
            return by_verifier, ""
        said = (by_reader or "that it is fine", by_verifier or "that it is fine")
        return by_verifier, f"the reader says {said[0]!r}, the verifier {said[1]!r}"


@contextmanager
def verdicts(folder: Path) -> Iterator[Verdicts]:
    """Build the C verifier's reader in a directory, and start it."""
    program = folder / "verdicts"
    parts = [one for one in verifier.SOURCES.glob("*.c") if one.name not in ("main.c", "command.c")]
    checks = ["-O1", "-fsanitize=undefined", "-fsanitize-trap=undefined"]
    words = [*verifier.FLAGS, *checks, f"-I{verifier.SOURCES}", *map(str, parts), str(_PROGRAM), "-lm"]
    verifier.run_zig_cc([*words, "-o", str(program)], verifier.own_target())
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Verdicts(process, folder)
        finally:
            process.kill()
