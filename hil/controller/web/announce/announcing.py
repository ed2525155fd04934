"""Send each new cause once. A file contains the causes that were sent."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import filelock

from hil.controller.records.base import read_record
from hil.controller.records.decisions.notification import (
    MAX_ANNOUNCED,
    AnnouncedCause,
    AnnouncedDocument,
    NightMessage,
    NotifyReport,
)
from hil.controller.storage.runs import write_file
from hil.controller.web.announce.messages import make_digest, make_messages
from hil.controller.web.announce.news import NightNews
from hil.controller.web.announce.receivers import Body, Receiver
from hil.core.digest import digest_of
from hil.errors import UsageError

NAME = "hil-notify.json"
MAX_BYTES = 4 << 20
_LOCK = ".hil-notify.lock"
_LOCK_SECONDS = 10.0


class Announcer:
    """Sender of the causes that a receiver does not have yet.

    Args:
        file: file with the announced causes.
    """

    def __init__(self, receiver: Receiver, file: Path) -> None:
        self._receiver = receiver
        self._file = file

    def announce(
        self, news: NightNews, *, is_digest: bool = False, dry_run: bool = False, show: Callable[[Body], None]
    ) -> NotifyReport:
        """Send the new causes, and store each after its message.

        Args:
            is_digest: send one message with all causes.
            dry_run: call ``show`` with each body instead of sending it.

        Raises:
            UsageError: the file is invalid, a link, or in use.
            StorageError: the file cannot be written.
            DeliveryFailed: the receiver did not accept a message. Earlier messages are stored as sent.
        """
        identity, sent = self._receiver.identity, list[str]()
        with contextlib.nullcontext() if dry_run else self._hold_lock():
            stored = self._read()
            before = {one.key for one in stored if one.receiver == identity and not self._receiver.is_status}
            fresh = [one for one in news.causes if one.key not in before]
            messages = make_messages(news, fresh, is_digest=is_digest)
            if self._receiver.is_status:
                messages = [make_digest(news, fresh)]
            for message in messages:
                if dry_run:
                    show(self._receiver.make_body(message))
                else:
                    self._receiver.send(message, _make_delivery_id(identity, message))
                    # A status is sent again, and would displace the causes of other receivers.
                    if not self._receiver.is_status:
                        stored = [*stored, *self._list_announced(message)]
                        self._write(stored)
                sent.append(message.title)
        return NotifyReport(
            baseline=news.baseline,
            dry_run=dry_run,
            receiver=self._receiver.name,
            sent=sent,
            announced=len(news.causes) - len(fresh),
            known=news.known,
            is_cut=news.is_cut,
        )

    def _list_announced(self, message: NightMessage) -> list[AnnouncedCause]:
        now, identity = time.time(), self._receiver.identity
        return [AnnouncedCause(receiver=identity, key=one.key, time=now) for one in message.causes]

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Hold the lock of the file, so that two processes do not send the same cause."""
        path = self._file.parent / _LOCK
        for one in (self._file, path):
            # Another user of a shared directory could redirect a write.
            if one.is_symlink():
                raise UsageError(f"{one} is a symbolic link", hint="replace the link by a file")
        if not self._file.parent.is_dir():
            raise UsageError(f"directory {self._file.parent} not found", hint="create it, or select another --state")
        lock = filelock.FileLock(path, timeout=_LOCK_SECONDS)
        try:
            with lock:
                yield
        except filelock.Timeout as error:
            raise UsageError(f"{self._file} is in use by another hil notify", hint="retry in a moment") from error

    def _read(self) -> Sequence[AnnouncedCause]:
        if not self._file.exists():
            return []
        return read_record(self._file, AnnouncedDocument, MAX_BYTES).announced

    def _write(self, announced: Sequence[AnnouncedCause]) -> None:
        document = AnnouncedDocument(schema=1, announced=list(announced)[-MAX_ANNOUNCED:])
        write_file(self._file, json.dumps(document.to_json(), indent=1, allow_nan=False).encode() + b"\n")


def _make_delivery_id(identity: str, message: NightMessage) -> str:
    """Return an ID that is the same if the message is sent again."""
    text = "\n".join((identity, message.event, *(one.key for one in message.causes)))
    return digest_of(text.encode()).rpartition(":")[2][:32]
