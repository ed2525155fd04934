"""Send typed errors of failed calls in the trailing metadata, and store long texts separately.

gRPC aborts a call with more than about 8 KiB of metadata, and the error is lost. Errors are therefore truncated. The
side that failed stores the full text under a secret name, which it sends only to the client.
"""

from __future__ import annotations

import collections
import secrets
import threading
from collections.abc import Callable, Iterator

from google.protobuf.message import DecodeError

from hil import errors
from hil.protocol.v1 import agent_pb2 as pb

ERROR_KEY = "hil-error-bin"

# Limits for the texts, in UTF-8 bytes. All texts take 5 KiB as Base64. The percent-encoded status text adds 0.6 KiB.
_MESSAGE_MAX = 1200
_HINT_MAX = 600
_DETAIL_MAX = 1900
_STATUS_MAX = 200
# Maximum size of a stored error's part, and number of stored errors.
_PART_MAX = 1 << 20
_MAX_STORED = 4
WHOLE_MAX = 3 * _PART_MAX + 1024
_PIECE = 1 << 18

AGENT_KINDS: frozenset[type[errors.HilError]] = frozenset(
    {
        errors.UsageError,
        errors.LoadFailed,
        errors.PartMissing,
        errors.RunFailed,
        errors.RunCrashed,
        errors.StageTimeout,
        errors.BoardError,
        errors.BoardLost,
        errors.BoardUnfit,
        errors.BlobDamaged,
        errors.BoardBusy,
        errors.BoardRefused,
        errors.BoardUnreachable,
        errors.ProtocolBroken,
        errors.SessionEnded,
    }
)
"""Error classes that an agent may report; the controller or the farm raise all others."""

WORKER_KINDS = frozenset({errors.UsageError, errors.LoadFailed, errors.PartMissing, errors.RunFailed})
"""Error classes that a worker may report. Board failures and worker crashes are not among them."""

BRIDGE_KINDS = WORKER_KINDS | {
    errors.RunCrashed,
    errors.BoardLost,
    errors.BoardUnfit,
    errors.BoardBusy,
    errors.BoardUnreachable,
    errors.ProtocolBroken,
}
"""Error classes of workers that run no program themselves, but talk to a microcontroller."""


class KeptErrors:
    """Full texts of recent long errors. Thread-safe."""

    def __init__(self) -> None:
        self._texts: collections.deque[tuple[str, bytes]] = collections.deque(maxlen=_MAX_STORED)
        self._lock = threading.Lock()

    def keep(self, text: bytes) -> str:
        """Store a text. Return an unguessable name for :meth:`iter_pieces`."""
        name = secrets.token_hex(16)
        with self._lock:
            self._texts.append((name, text))
        return name

    def iter_pieces(self, name: str) -> Iterator[str]:
        """Yield a stored text in pieces of at most 256 KiB. Yields nothing for an unknown name."""
        with self._lock:
            text = next(
                (text for kept, text in self._texts if secrets.compare_digest(kept.encode(), _encode_utf8(name))), b""
            )
        while text:
            piece = text[:_PIECE].decode(errors="ignore")
            text = text[len(piece.encode()) :]
            yield piece


def to_message(error: errors.HilError, kept: KeptErrors | None = None) -> pb.Error:
    """Convert a typed error to a message for metadata. If it is truncated, store the full text in ``kept``."""
    message, hint, detail = (_encode_utf8(part) for part in (error.message, error.hint, error.detail))
    log = ""
    cut_words = len(message) > _MESSAGE_MAX or len(hint) > _HINT_MAX
    if kept is not None and (cut_words or len(detail) > _DETAIL_MAX):
        parts = (message, hint, detail) if cut_words else (detail,)
        log = kept.keep(b"\n".join(cut(part, _PART_MAX, tail=part is detail).encode() for part in parts if part))
    return pb.Error(
        kind=type(error).__name__,
        message=cut(message, _MESSAGE_MAX),
        hint=cut(hint, _HINT_MAX),
        detail=cut(detail, _DETAIL_MAX, tail=True),
        log=log,
        code=error.code.value,
    )


def format_status(error: errors.HilError) -> str:
    """Return the status message of a failed call, for clients that ignore the typed error."""
    # gRPC encodes each byte outside printable ASCII as three bytes.
    return error.message[:_STATUS_MAX].encode("ascii", "replace").decode() or type(error).__name__


def make_error(
    kind: str,
    message: str,
    hint: str = "",
    detail: str = "",
    code: str = "",
    *,
    among: frozenset[type[errors.HilError]] | None = None,
    otherwise: type[errors.HilError] = errors.BoardError,
) -> errors.HilError:
    """Return the typed error for parts received from a peer.

    Args:
        kind: name of the error class.
        message, hint, detail: texts of the error.
        among: error classes that the peer may report; None allows all of hil's.
        otherwise: class for all other kinds.
    """
    found = getattr(errors, kind, None)
    if not (isinstance(found, type) and issubclass(found, errors.HilError)) or found is errors.HilError:
        found = otherwise
    if among is not None and found not in among:
        found = otherwise
    error = found(message, hint=hint, detail=detail)
    error.code = errors.ErrorCode(code)
    return error


def decode_error(
    sent: bytes,
    *,
    among: frozenset[type[errors.HilError]] | None = None,
    whole: Callable[[str], str] | None = None,
) -> errors.HilError | None:
    """Parse the serialized error of a failed call. Return None if it is empty or invalid.

    Args:
        sent: serialized ``Error``.
        among: error classes that the peer may report; None allows all of hil's.
        whole: fetches the full text of a truncated error by name; returns "" on failure.
    """
    if not sent:
        return None
    try:
        error = pb.Error.FromString(sent)
    except (DecodeError, TypeError):
        return None
    detail = (whole(error.log) if whole is not None and error.log else "") or error.detail
    return make_error(error.kind, error.message, error.hint, detail, error.code, among=among)


def cut(text: bytes, most: int, *, tail: bool = False) -> str:
    """Truncate a text to its first or last bytes, without splitting characters, and add a note."""
    if len(text) <= most:
        return text.decode(errors="replace")
    note = f"[cut: {len(text)} bytes in all]"
    room = most - len(note) - 1
    if tail:
        return f"{note}\n{text[-room:].decode(errors='ignore')}"
    return f"{text[:room].decode(errors='ignore')} {note}"


def _encode_utf8(text: str) -> bytes:
    """Encode a text as UTF-8. Lone surrogates are escaped."""
    return text.encode("utf-8", "backslashreplace")
