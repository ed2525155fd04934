from __future__ import annotations

import errno
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.waiting import allowed_s, eventually

from hil.controller.storage.isolation import isolated
from hil.controller.storage.isolation.isolated import (
    Isolated,
    IsolatedCrash,
    IsolatedFailure,
    IsolatedTimeout,
    get_function_name,
    lend_pool,
    make_function_version,
)
from hil.controller.storage.isolation.isolated_worker import ERROR_FIELDS, SCRATCH
from hil.core.cancellation import WorkCancelled, cancel_on
from hil.errors import ImportFailed, StorageError

FUNCTIONS = """
import ctypes, os, subprocess, sys, time
from hil.errors import ImportFailed

def echo(**values):
    print("to stdout"); print("to stderr", file=sys.stderr)
    return values

def pid(): return os.getpid()
def fail(): raise ValueError("first line\\nsecond line")
def typed(): raise ImportFailed("broken", hint="mend it", detail="in the middle", stage="import")
def fill(number): raise OSError(number, os.strerror(number), "/data/out")
def crash():
    print("last words", flush=True)
    ctypes.string_at(0)
def leave(code): os._exit(code)
def nothing_json(): return {1, 2}
def child(note):
    process = subprocess.Popen(["sleep", "600"])
    with open(note, "w") as file: file.write(f"{os.getpid()} {process.pid}")
    process.wait()
def meet(mine, other):
    open(mine, "w").close()
    end = time.monotonic() + 30
    while not os.path.exists(other) and time.monotonic() < end:
        time.sleep(0.01)
    return os.path.exists(other)
def speak(text, times=1):
    for fd in range(3, 12):
        try:
            for _ in range(times): os.write(fd, text.encode("latin-1"))
        except OSError: pass
    time.sleep(600)
def where(): return [os.getcwd() in sys.path, "" in sys.path]
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "isolated_functions.py").write_text(FUNCTIONS)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    yield "isolated_functions"
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def pool(functions: str) -> Iterator[Isolated]:
    with Isolated(2) as pool:
        yield pool


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout
    except FileNotFoundError:
        return True
    return not state.strip().startswith("Z") and bool(state.strip())


def test_isolated_returns_result_and_logs_output(pool: Isolated, functions: str, tmp_path: Path) -> None:
    log = tmp_path / "deep" / "log"
    assert pool.call(f"{functions}:echo", {"a": [1, None, "é"]}, timeout=60, log=log) == {"a": [1, None, "é"]}
    assert "to stdout" in log.read_text() and "to stderr" in log.read_text()


def test_isolated_reuses_worker(pool: Isolated, functions: str, tmp_path: Path) -> None:
    pids = {pool.call(f"{functions}:pid", {}, timeout=60, log=tmp_path / "log") for _ in range(3)}
    assert len(pids) == 1 and os.getpid() not in pids


def test_isolated_imports_first_from_given_folders(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "only_in_folders.py").write_text(f"def which(): return {name!r}\n")
    with Isolated(1, folders=[str(tmp_path / "first"), str(tmp_path / "second")]) as pool:
        assert pool.call("only_in_folders:which", {}, timeout=60, log=tmp_path / "log") == "first"


def test_isolated_raises_hil_error_unchanged(pool: Isolated, functions: str, tmp_path: Path) -> None:
    with pytest.raises(ImportFailed) as caught:
        pool.call(f"{functions}:typed", {}, timeout=60, log=tmp_path / "log")
    error = caught.value
    assert (error.message, error.hint, error.detail, error.stage) == ("broken", "mend it", "in the middle", "import")


def test_isolated_reports_other_errors_with_traceback(pool: Isolated, functions: str, tmp_path: Path) -> None:
    with pytest.raises(IsolatedFailure, match="ValueError: first line") as caught:
        pool.call(f"{functions}:fail", {}, timeout=60, log=tmp_path / "log")
    assert "Traceback" in caught.value.detail and "second line" in caught.value.detail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_isolated_reports_full_disk(pool: Isolated, functions: str, tmp_path: Path, number: int) -> None:
    with pytest.raises(StorageError) as caught:
        pool.call(f"{functions}:fill", {"number": number}, timeout=60, log=tmp_path / "log")
    assert caught.value.message == f"cannot write /data/out: {os.strerror(number)}"
    assert "HIL_CACHE_DIR" in caught.value.hint


@pytest.mark.parametrize("function", ["nothing_json", "missing"])
def test_isolated_reports_missing_function_or_result(
    pool: Isolated, functions: str, tmp_path: Path, function: str
) -> None:
    with pytest.raises(IsolatedFailure):
        pool.call(f"{functions}:{function}", {}, timeout=60, log=tmp_path / "log")


def test_isolated_reports_signal_and_survives_crash(pool: Isolated, functions: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of an earlier call\n")
    with pytest.raises(IsolatedCrash, match="SIGSEGV") as caught:
        pool.call(f"{functions}:crash", {}, timeout=60, log=log)
    assert "last words" in caught.value.detail and "earlier" not in caught.value.detail
    assert pool.call(f"{functions}:echo", {}, timeout=60, log=log) == {}


def test_isolated_ends_cancelled_call(pool: Isolated, functions: str, tmp_path: Path) -> None:
    note, flag = tmp_path / "pid", threading.Event()
    threading.Thread(target=lambda: (eventually(note.exists), flag.set())).start()
    with cancel_on(flag), pytest.raises(WorkCancelled):
        pool.call(f"{functions}:meet", {"mine": str(note), "other": "/nowhere"}, timeout=60, log=tmp_path / "log")
    assert pool.call(f"{functions}:echo", {}, timeout=60, log=tmp_path / "log") == {}


@pytest.mark.ci
def test_isolated_replaces_worker_killed_while_idle(pool: Isolated, functions: str, tmp_path: Path) -> None:
    first = pool.call(f"{functions}:pid", {}, timeout=60, log=tmp_path / "log")
    os.kill(first, signal.SIGSTOP)  # alive but stopped, like a worker that dies between the check and its call
    found: list[int] = []
    log = tmp_path / "next"
    caller = threading.Thread(target=lambda: found.append(pool.call(f"{functions}:pid", {}, timeout=30, log=log)))
    caller.start()
    eventually(lambda: bool(pool._busy))
    os.kill(first, signal.SIGKILL)
    caller.join(30)
    assert len(found) == 1 and found[0] != first


def test_isolated_reports_worker_startup_failure(
    functions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python exits because it finds no standard library.
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    with Isolated(1) as pool, pytest.raises(IsolatedCrash, match="exited with code 1"):
        pool.call(f"{functions}:pid", {}, timeout=30, log=tmp_path / "log")


def test_isolated_returns_large_result(pool: Isolated, functions: str, tmp_path: Path) -> None:
    text = "long \n" * 100_000
    assert pool.call(f"{functions}:echo", {"text": text}, timeout=30, log=tmp_path / "log") == {"text": text}


def test_isolated_reports_exit_code(pool: Isolated, functions: str, tmp_path: Path) -> None:
    with pytest.raises(IsolatedCrash, match="exited with code 3"):
        pool.call(f"{functions}:leave", {"code": 3}, timeout=60, log=tmp_path / "log")


def test_isolated_timeout_kills_worker_and_children(pool: Isolated, functions: str, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    pool.call(f"{functions}:pid", {}, timeout=60, log=tmp_path / "log")  # wait for the worker to start
    with pytest.raises(IsolatedTimeout, match="2 s"):
        pool.call(f"{functions}:child", {"note": str(note)}, timeout=2, log=tmp_path / "log")
    worker, child = map(int, note.read_text().split())
    eventually(lambda: not alive(worker) and not alive(child))


@pytest.mark.ci
def test_isolated_runs_calls_of_threads_in_parallel(pool: Isolated, functions: str, tmp_path: Path) -> None:
    def meet(number: int) -> bool:
        places = {"mine": str(tmp_path / f"{number}"), "other": str(tmp_path / f"{1 - number}")}
        return bool(pool.call(f"{functions}:meet", places, timeout=60, log=tmp_path / f"log-{number}"))

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(meet, range(2))) == [True, True]


def test_isolated_close_ends_running_calls(functions: str, tmp_path: Path) -> None:
    pool = Isolated(1)
    note = tmp_path / "pids"
    caught: list[BaseException] = []

    def call() -> None:
        try:
            pool.call(f"{functions}:child", {"note": str(note)}, timeout=None, log=tmp_path / "log")
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    eventually(lambda: note.exists() and len(note.read_text().split()) == 2)
    pool.close()
    thread.join(60)
    assert len(caught) == 1 and isinstance(caught[0], IsolatedCrash)
    with pytest.raises(IsolatedCrash, match="stopped"):
        pool.call(f"{functions}:pid", {}, timeout=60, log=tmp_path / "log")


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_isolated_processes_end_with_controller(functions: str, tmp_path: Path, number: signal.Signals) -> None:
    # The script has no __main__ guard: the worker must not import it.
    note = tmp_path / "pids"
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\nfrom hil.controller.storage.isolation.isolated import Isolated\n"
        f"log = Path({str(tmp_path / 'log')!r})\n"
        f"Isolated(1).call('{functions}:child', {{'note': {str(note)!r}}}, timeout=None, log=log)\n"
    )
    root = str(Path(__file__).parents[4])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ["PYTHONPATH"]])}
    controller = subprocess.Popen([sys.executable, str(script)], env=environment, stderr=subprocess.DEVNULL)
    eventually(lambda: note.exists() and len(note.read_text().split()) == 2)
    worker, child = map(int, note.read_text().split())
    controller.send_signal(number)
    controller.wait(allowed_s(60))
    eventually(lambda: not alive(worker) and not alive(child))


@pytest.mark.ci
@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH came with Python 3.11")
def test_isolated_imports_skip_working_directory(
    functions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    with Isolated(1) as pool:
        assert pool.call(f"{functions}:where", {}, timeout=60, log=tmp_path / "log") == [False, False]


def test_lent_closes_only_newly_created_pool(functions, tmp_path):
    with Isolated(1) as pool:
        with lend_pool(pool) as first:
            pid = first.call(f"{functions}:pid", {}, timeout=30, log=tmp_path / "log")
        with lend_pool(pool) as second:
            assert second.call(f"{functions}:pid", {}, timeout=30, log=tmp_path / "log") == pid
        assert not pool.closed
    with lend_pool(None, 3) as own:
        assert own.workers == 3 and not own.closed
    assert own.closed


def test_worker_of_killed_controller_deletes_files(functions, tmp_path):
    code = f"""
import os, tempfile
from pathlib import Path
from hil.controller.storage.isolation.isolated import Isolated
pool = Isolated(1)
pool.call({functions!r} + ":pid", {{}}, timeout=30, log=Path({str(tmp_path / "log")!r}))
print(len(list(Path(os.environ["TMPDIR"]).rglob({SCRATCH + "*"!r}))), flush=True)
os.kill(os.getpid(), 9)
"""
    (tmp_path / "scratch").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "scratch")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert done.returncode == -signal.SIGKILL
    assert int(done.stdout) == 1
    eventually(lambda: not list((tmp_path / "scratch").rglob(SCRATCH + "*")))


@pytest.mark.ci
@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[" * 100_000,
        "\xff",
        "[]",
        "{}",
        '{"error": 1}',
        '{"error": {"class": "hil.errors:ImportFailed", "message": 1, "detail": ""}}',
        '{"error": {"class": "hil.errors:ImportFailed", "message": "", "detail": ""}}',
    ],
)
def test_isolated_reports_malformed_response_as_crash(functions, tmp_path, text):
    with Isolated(1) as pool:
        with pytest.raises(IsolatedCrash, match="an invalid response"):
            pool.call(f"{functions}:speak", {"text": text + "\n"}, timeout=60, log=tmp_path / "log")
        assert pool.call(f"{functions}:echo", {"a": 1}, timeout=60, log=tmp_path / "log") == {"a": 1}


def test_isolated_reports_oversized_response_as_crash(functions, tmp_path, monkeypatch):
    monkeypatch.setattr(isolated, "_MAX_BYTES", 1 << 20)
    with Isolated(1) as pool, pytest.raises(IsolatedCrash, match="more than 1 MiB"):
        pool.call(f"{functions}:speak", {"text": "x" * 65536, "times": 10**6}, timeout=60, log=tmp_path / "log")


@pytest.mark.ci
@pytest.mark.parametrize("name", ["os:system", "hil.errors:difflib", "hil.nothing:X", "shutil:Error", ".:x", ":"])
def test_isolated_reports_unknown_error_class_as_failure(functions, tmp_path, name):
    error = dict.fromkeys(ERROR_FIELDS, "") | {"class": name, "message": "boo"}
    with Isolated(1) as pool, pytest.raises(IsolatedFailure, match="boo"):
        text = json.dumps({"error": error}) + "\n"
        pool.call(f"{functions}:speak", {"text": text}, timeout=60, log=tmp_path / "log")


def test_function_name_uses_defining_module(pool, tmp_path):
    assert get_function_name(os.getpid) == "posix:getpid"
    assert get_function_name("vendor.tools:apply") == "vendor.tools:apply"
    assert pool.call(os.getpid, {}, timeout=60, log=tmp_path / "log") != os.getpid()


def test_function_version_depends_on_file_content(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    seen = set()
    for text in ("one", "two"):
        (tmp_path / "vendor_recipe.py").write_text(f"def apply():\n    return {text!r}\n")
        isolated._digest_of_file.cache_clear()  # simulates a new process
        seen.add(make_function_version("vendor_recipe:apply"))
    assert len(seen) == 2 and {one.split()[0] for one in seen} == {"vendor_recipe:apply"}
    own = make_function_version(get_function_name)
    assert own.startswith("hil.controller.storage.isolation.isolated:get_function_name blake3:")
    assert make_function_version("vendor_gone:apply") == "vendor_gone:apply"


def test_isolated_rejects_unimportable_function(pool, tmp_path):
    def local():
        return 1

    main = types.FunctionType(local.__code__, {}, "main")
    main.__module__ = "__main__"
    main.__qualname__ = "main"
    for unreachable in (local, lambda: 1, Isolated.close, functools.partial(os.getpid), main):
        with pytest.raises(ValueError, match=r"cannot call .* in a worker process"):
            pool.call(unreachable, {}, timeout=60, log=tmp_path / "log")
    assert not (tmp_path / "log").exists()
