"""A process that has a runtime imported and forks a worker for each program.

Started as `python -m hil.agent.forkserver FD MODULE:CLASS MEMORY_LIMIT`. A fork takes a millisecond where a fresh
interpreter takes 200, so every program gets a process of its own and none is ever used twice. This process starts no
thread and opens no device. It ends, killing its workers and whatever they started, when the agent does; what a worker
leaves behind ends with the worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from typing import Any

from hil.agent import descendants, framing, worker
from hil.agent.confinement import confine, seclude
from hil.agent.runtimes import resolve
from hil.agent.shm import Arena

_MOST_ERROR = 4000


def main() -> None:
    """Serve the agent's fork orders until it hangs up."""
    seclude()
    descendants.adopt()
    control = framing.Channel(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.send(_describe(sys.argv[2]))
    _preload(sys.argv[2])
    gc.freeze()
    workers: set[int] = set()
    # A library's own, which it started as it was imported: they stay as long as we do.
    helpers = descendants.children()
    wake_read, wake_write = socket.socketpair()
    wake_read.setblocking(False)
    wake_write.setblocking(False)
    signal.set_wakeup_fd(wake_write.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(control.sock, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    try:
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    wake_read.recv(4096)
                _reap(control, workers, helpers)
            if control.sock in ready:
                _, fds = control.receive_fds(4)
                ours = os.getpid()
                try:
                    pid = os.fork()
                except OSError as error:
                    pid = -1
                    control.send({"failed": error.strerror})
                if pid == 0:
                    selector.close()
                    _become_worker(ours, [control.sock, wake_read, wake_write], fds, int(sys.argv[3]))
                for fd in fds:
                    os.close(fd)
                if pid > 0:
                    workers.add(pid)
                    control.send({"pid": pid})
    except (framing.Closed, framing.Garbled):
        pass
    finally:
        for pid in workers:
            _kill(pid)
        descendants.end_children((), {})


def _describe(reference: str) -> dict[str, Any]:
    """Import the runtime here and let a child ask it for its devices: looking at a driver (CUDA's, say) before a fork
    would leave it unusable after."""
    try:
        runtime = resolve(reference)
    except Exception as error:
        return _wrong(error)
    ours, theirs = (framing.Channel(sock) for sock in socket.socketpair())
    pid = os.fork()
    if pid == 0:
        try:
            theirs.send(runtime.describe())
        except Exception as error:
            theirs.send(_wrong(error))
        finally:
            os._exit(0)
    theirs.close()
    try:
        described: dict[str, Any] = ours.receive(timeout=60)
    except (framing.Closed, framing.Garbled, framing.Late):
        os.kill(pid, signal.SIGKILL)
        described = {"error": "it died while looking for devices"}
    os.waitpid(pid, 0)
    ours.close()
    return described


def _wrong(error: Exception) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}"[:_MOST_ERROR]}


def _preload(reference: str) -> None:
    """Import what every worker would: once for all. What is wrong with it, loading a program will say."""
    with contextlib.suppress(Exception):
        getattr(resolve(reference), "preload", lambda: None)()


def _reap(control: framing.Channel, workers: set[int], helpers: set[int]) -> None:
    """Tell of workers that have ended, once all that they started has ended as well."""
    ended: dict[int, int] = {}
    descendants.end_children(workers | helpers, ended)
    for pid in workers & ended.keys():
        workers.discard(pid)
        # Where nobody tells of those that have left their parents: what is left of its group.
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        control.send({"exited": pid, "status": os.waitstatus_to_exitcode(ended[pid])})


def _kill(pid: int) -> None:
    # By its own number too: a worker that was forked just now has no group of its own yet.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)


def _become_worker(parent: int, inherited: list[socket.socket], fds: list[int], memory_limit: int) -> None:
    """In the forked child: a session of its own, stderr into the agent's pipe, then orders until the end."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for sock in inherited:
            sock.close()
        sock_fd, in_fd, out_fd, stderr_fd = fds
        os.dup2(stderr_fd, 1)
        os.dup2(stderr_fd, 2)
        os.close(stderr_fd)
        # What loses its parent while this worker lives comes to it, and ends with it, not before.
        descendants.adopt()
        confine(parent, memory_limit)
        faulthandler.enable()
        worker.serve(framing.Channel(socket.socket(fileno=sock_fd)), Arena(in_fd), Arena(out_fd))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # No clean-up of a vendor's library: it may hang, and the memory goes with the process.
    os._exit(0)


if __name__ == "__main__":
    main()
    # As in a worker: no clean-up of a vendor's library.
    os._exit(0)
