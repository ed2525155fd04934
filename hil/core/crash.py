"""Report unexpected exceptions. Such an exception is a bug in hil, not a defect of a model or board."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path

from hil.core import own_version
from hil.core.text import HIDDEN, hide_logins
from hil.errors import InternalError

_PACKAGES = ("numpy", "grpcio", "protobuf", "onnx", "onnxruntime", "iree-base-compiler", "iree-base-runtime", "torch")
# Options with secret values, matched by name.
_SECRET_OPTION = re.compile(r"--?[\w-]*(?:token|password|passphrase|secret|credential|key)[\w-]*", re.I)
_SHOWN_LINES = 10


def report_crash(error: Exception) -> InternalError:
    """Write a report on an unexpected exception, and return the error for the user.

    The report contains the traceback, versions, and the command line without secrets. If the report cannot be
    written, the error contains only the traceback.
    """
    lines = "".join(traceback.format_exception(error)).splitlines()
    secrets = list(_iter_secrets(sys.argv[1:]))
    detail = "\n".join(["Traceback (most recent call last):", *lines[-_SHOWN_LINES:]])
    hint = "this is a bug in hil: report it"
    with contextlib.suppress(OSError):
        path = _write("\n".join([*_iter_head(), "", *lines, ""]), secrets)
        hint += f", with the file {path}"
    last = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return InternalError(
        f"internal error: {_hide_secrets(last, secrets)}", hint=hint, detail=_hide_secrets(detail, secrets)
    )


def _write(text: str, secrets: Sequence[str]) -> Path:
    number, path = tempfile.mkstemp(prefix="hil-crash-", suffix=".txt")
    with os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(_hide_secrets(text, secrets))
    return Path(path)


def _iter_head() -> Iterator[str]:
    yield f"hil {own_version()}, Python {platform.python_version()}, {platform.platform()}"
    yield f"time: {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
    yield f"command: {shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}"
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"


def _iter_secrets(words: Sequence[str]) -> Iterator[str]:
    """Yield the values of secret options."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        option, equals, value = word.partition("=")
        if _SECRET_OPTION.fullmatch(option) and (secret := value if equals else following):
            yield secret


def _hide_secrets(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(shlex.quote(secret), HIDDEN).replace(secret, HIDDEN)
    return hide_logins(text)
