"""Worker process of :mod:`hil.controller.storage.isolation.isolated`, started with ``python -m``.

The worker reads one request per line from stdin. For each request, it first reports the start, then the result.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from hil.core.guarded import format_error
from hil.core.scratch import remove_tree
from hil.core.storage_errors import make_full_disk_error
from hil.errors import HilError, StorageError

# Name prefix of a worker's temporary directory.
SCRATCH = "hil-isolated-"
# Error attributes in a reply. All are strings.
ERROR_FIELDS = ("message", "stage", "board", "hint", "detail", "code", "option")


def main() -> None:
    """Serve requests from stdin until it closes."""
    if (root := str(Path(__file__).resolve().parents[4])) not in sys.path:
        sys.path.insert(0, root)
    # Reserve the pipes for the protocol: output of called functions and their child processes goes to a log.
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)
    import faulthandler

    faulthandler.enable()
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_watch, args=(requests, lines), daemon=True).start()

    def send_reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    while True:
        request = json.loads(lines.get())
        send_reply({"begun": True})
        send_reply(_serve(request))


def _watch(requests: Any, lines: queue.SimpleQueue[bytes]) -> None:
    for line in requests:
        lines.put(line)
    # The controller ended, possibly during a call. Discard the results.
    if (scratch := Path(os.environ.get("TMPDIR", ""))).name.startswith(SCRATCH):
        remove_tree(scratch)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    _print_to(request["log"])
    try:
        module, name = request["function"].split(":")
        result = getattr(importlib.import_module(module), name)(**request["args"])
        json.dumps(result)
        return {"result": result}
    except HilError as error:
        return {"error": {"class": f"{type(error).__module__}:{type(error).__qualname__}", **_list_fields(error)}}
    except BaseException as error:
        traceback.print_exc()
        if (full := make_full_disk_error(error)) is not None:
            return {"error": {"class": f"{StorageError.__module__}:{StorageError.__qualname__}", **_list_fields(full)}}
        return {"error": {"class": "", **_list_fields(HilError(format_error(error), detail=traceback.format_exc()))}}
    finally:
        _flush()
        _print_to(os.devnull)


def _list_fields(error: HilError) -> dict[str, str]:
    return {key: getattr(error, key) for key in ERROR_FIELDS}


def _print_to(path: str) -> None:
    """Append the output of called functions and their child processes to a file."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(Exception):  # C++ libraries print through C's buffers
        import ctypes

        ctypes.CDLL(None).fflush(None)


if __name__ == "__main__":
    main()
