"""Typed errors as a failed call carries them: in its trailing metadata, and what is too long for that beside it.

gRPC ends a call whose metadata takes more than some 8 KiB, and the error in it is lost. An error is therefore cut to
what fits; the whole text is kept by the side that failed, under a name that only the caller is told.
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

# Bytes of UTF-8. Base64 makes 5 KiB of their sum, and the percent-encoded status text takes 0.6 KiB beside it.
_MESSAGE_MAX = 1200
_HINT_MAX = 600
_DETAIL_MAX = 1900
_STATUS_MAX = 200
# Of each part of an error that is kept whole, and how many errors are.
_PART_MAX = 1 << 20
_KEPT = 4
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
        errors.BlobDamaged,
        errors.BoardBusy,
        errors.BoardRefused,
        errors.SessionEnded,
    }
)
"""What an agent may say went wrong; other kinds are the controller's and the farm's own findings."""

WORKER_KINDS = frozenset({errors.UsageError, errors.LoadFailed, errors.PartMissing, errors.RunFailed})
"""What a worker may say went wrong: neither that the board failed, nor how the worker itself ended."""


class KeptErrors:
    """The last long errors, whole. For many threads."""

    def __init__(self) -> None:
        self._texts: collections.deque[tuple[str, bytes]] = collections.deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def keep(self, text: bytes) -> str:
        """Keep a text; returns the name to ask for it by, which nobody can guess."""
        name = secrets.token_hex(16)
        with self._lock:
            self._texts.append((name, text))
        return name

    def pieces(self, name: str) -> Iterator[str]:
        """A kept text in pieces of at most 256 KiB; none where it is not kept any more."""
        with self._lock:
            text = next((text for kept, text in self._texts if secrets.compare_digest(kept.encode(), _utf8(name))), b"")
        while text:
            piece = text[:_PIECE].decode(errors="ignore")
            text = text[len(piece.encode()) :]
            yield piece


def to_message(error: errors.HilError, kept: KeptErrors | None = None) -> pb.Error:
    """A typed error as a call's metadata carries it; where it is cut, all of it goes to ``kept``."""
    message, hint, detail = (_utf8(part) for part in (error.message, error.hint, error.detail))
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
    )


def status_text(error: errors.HilError) -> str:
    """The status message of a failed call, for whoever does not read the typed error."""
    # gRPC writes each byte that is no printable ASCII as three.
    return error.message[:_STATUS_MAX].encode("ascii", "replace").decode() or type(error).__name__


def from_parts(
    kind: str,
    message: str,
    hint: str = "",
    detail: str = "",
    *,
    among: frozenset[type[errors.HilError]] | None = None,
    otherwise: type[errors.HilError] = errors.BoardError,
) -> errors.HilError:
    """The typed error of a kind that came from elsewhere.

    Args:
        among: the kinds that the far side may say; None is any of hil's.
        otherwise: for every other kind.
    """
    found = getattr(errors, kind, None)
    if not (isinstance(found, type) and issubclass(found, errors.HilError)) or found is errors.HilError:
        found = otherwise
    if among is not None and found not in among:
        found = otherwise
    return found(message, hint=hint, detail=detail)


def from_bytes(
    sent: bytes,
    *,
    among: frozenset[type[errors.HilError]] | None = None,
    whole: Callable[[str], str] | None = None,
) -> errors.HilError | None:
    """The typed error that the far side of a failed call sent, serialised; None where that is nothing or unreadable.

    Args:
        among: the kinds that the far side may say; None is any of hil's.
        whole: fetches the whole text of an error that was cut, by its name; "" where it is not to be had.
    """
    if not sent:
        return None
    try:
        error = pb.Error.FromString(sent)
    except (DecodeError, TypeError):
        return None
    detail = (whole(error.log) if whole is not None and error.log else "") or error.detail
    return from_parts(error.kind, error.message, error.hint, detail, among=among)


def cut(text: bytes, most: int, *, tail: bool = False) -> str:
    """The first bytes of a text, or the last, at whole characters, and a note where something is left out."""
    if len(text) <= most:
        return text.decode(errors="replace")
    note = f"[cut: {len(text)} bytes in all]"
    room = most - len(note) - 1
    if tail:
        return f"{note}\n{text[-room:].decode(errors='ignore')}"
    return f"{text[:room].decode(errors='ignore')} {note}"


def _utf8(text: str) -> bytes:
    """A text's UTF-8; what is none of it (a lone surrogate) is written out."""
    return text.encode("utf-8", "backslashreplace")
