"""The simulator's sandbox: native code cannot harm the user's machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hil.agent import confinement

A = np.arange(4096, dtype=np.float32)
needs_namespaces = pytest.mark.skipif(
    bool(confinement.find_sandbox_error()), reason=f"no sandbox here: {confinement.find_sandbox_error()}"
)

# Attacks of a hostile program, each run as a worker. It prints the results.
ATTACKS = """
import ctypes, fcntl, json, os, resource, signal, socket, sys, tempfile, time
from pathlib import Path
from hil.agent import confinement
victim, folder, port = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
KEYS = {"x86_64": (248, 250), "aarch64": (217, 219)}[os.uname().machine]  # add_key keyctl
key = ctypes.CDLL(None).syscall(KEYS[0], b"user", b"hil-sandbox-test", b"secret", 6, -3)
confinement.enter_sandbox([folder / "mine"])
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
remount = lambda: call("mount", None, str(folder).encode(), None, 32 | 4096, None)
def nested():
    call("unshare", 0x10000000 | 0x20000)
    remount()
def datagram(send):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        send(one, str(folder / "datagrams"))
def have_signalled():
    mine, other = socket.socketpair()
    fcntl.fcntl(mine, fcntl.F_SETOWN, victim)
    fcntl.fcntl(mine, 10, signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(mine, fcntl.F_SETFL, os.O_ASYNC)
    other.send(b"x")
def read_key():
    call("syscall", KEYS[1], 11, key, ctypes.create_string_buffer(9), 9)
def on_file(act, *words):
    act(os.open(folder / "file", os.O_RDONLY), *words)
attacks = {
    "write": lambda: (folder / "theirs").write_text(""),
    "write home": lambda: Path.home().joinpath(".hil-was-here").write_text(""),
    "remove": lambda: (folder / "file").unlink(),
    "loopback": lambda: socket.create_connection(("127.0.0.1", port), 5),
    "abstract socket": lambda: socket.socket(socket.AF_UNIX).connect("\\0hil-sandbox-test-%d" % victim),
    "socket of a file": lambda: socket.socket(socket.AF_UNIX).connect(str(folder / "socket")),
    "kill": lambda: os.kill(victim, 0),
    "kill all": lambda: os.kill(-1, 0),
    "ptrace": lambda: call("ptrace", 16, victim, 0, 0),
    "memory": lambda: open(f"/proc/{victim}/mem", "rb").read(1),
    "remount": remount,
    "remount in another namespace": nested,
    "another namespace": lambda: call("unshare", 0x10000000),
    "limit": lambda: resource.prlimit(victim, resource.RLIMIT_CPU, (1, 1)),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, victim, 19),
    "idle": lambda: os.sched_setscheduler(victim, os.SCHED_IDLE, os.sched_param(0)),
    "datagram": lambda: datagram(lambda one, to: one.sendto(b"x", to)),
    "message": lambda: datagram(lambda one, to: one.sendmsg([b"x"], [], 0, to)),
    "pipe of a file": lambda: os.close(os.open(folder / "pipe", os.O_WRONLY | os.O_NONBLOCK)),
    "have signalled": have_signalled,
    "key": read_key,
    "lock": lambda: on_file(fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB),
    "lock of a part": lambda: on_file(fcntl.lockf, fcntl.LOCK_SH | fcntl.LOCK_NB),
    "lease": lambda: on_file(fcntl.fcntl, fcntl.F_SETLEASE, fcntl.F_RDLCK),
    "disk": lambda: next(one for one in Path("/dev").iterdir() if one.is_block_device()) and None,
    "mknod": lambda: os.mknod("/dev/shm/disk", 0o60600, os.makedev(8, 0)),
}
done = {}
for name, attack in attacks.items():
    try:
        attack()
        done[name] = "done"
    except (OSError, StopIteration) as error:
        done[name] = "refused"
(folder / "mine" / "note").write_text("")
Path("/dev/shm/folder").mkdir()
Path(tempfile.mkstemp()[1]).rename("/dev/shm/folder/moved")
resource.prlimit(0, resource.RLIMIT_CORE, (0, 0))
tempfile.TemporaryFile().write(b"scratch")
os.kill(os.getpid(), 0)
print(json.dumps(done))
"""


@needs_namespaces
@pytest.mark.parametrize("user", ["own", "nobody"])
def test_sandbox_blocks_native_code_attacks(user: str):
    # Not pytest's directory, which only one user can access.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        attack(Path(folder), user)


def attack(tmp_path: Path, user: str) -> None:
    if user == "nobody" and os.geteuid():
        pytest.skip("only root can become another user")
    (tmp_path / "mine").mkdir()
    (tmp_path / "file").write_text("")
    if user == "nobody":
        os.chown(tmp_path / "file", 65534, 65534)  # only the owner may take a lease
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "pipe").chmod(0o666)
    for path in (tmp_path, tmp_path / "mine"):
        path.chmod(0o777)
    victim = subprocess.Popen(["sleep", "600"], user=65534 if user == "nobody" else None)
    local = socket.AF_UNIX
    with (
        socket.socket() as server,
        socket.socket(local) as abstract,
        socket.socket(local) as named,
        closing(socket.socket(local, socket.SOCK_DGRAM)) as datagrams,
    ):
        datagrams.bind(str(tmp_path / "datagrams"))
        (tmp_path / "datagrams").chmod(0o777)
        server.bind(("127.0.0.1", 0))
        server.listen()
        abstract.bind(f"\0hil-sandbox-test-{victim.pid}")
        abstract.listen()
        named.bind(str(tmp_path / "socket"))
        named.listen()
        (tmp_path / "socket").chmod(0o777)
        words = [str(victim.pid), str(tmp_path), str(server.getsockname()[1])]
        # Fork, like a worker: a different user may be unable to read Python's files.
        code = f"import os, sys\nsys.argv[1:] = {words}\n{IMPORTS}"
        code += (
            "os.setgroups([])\nos.setgid(65534)\nos.setuid(65534)\nctypes.CDLL(None).prctl(4, 1)\n"
            if user == "nobody"
            else ""
        )
        ended = subprocess.run([sys.executable, "-c", code + ATTACKS], capture_output=True, text=True, timeout=60)
    os.close(pipe)
    assert victim.poll() is None
    victim.kill()
    victim.wait()
    assert ended.returncode == 0, ended.stderr
    assert set(json.loads(ended.stdout).values()) == {"refused"}, ended.stdout
    assert (tmp_path / "file").exists() and (tmp_path / "mine" / "note").exists()


IMPORTS = (
    "import ctypes, fcntl, json, resource, signal, socket, tempfile, encodings.idna\nimport hil.agent.confinement\n"
)


@needs_namespaces
@pytest.mark.parametrize("runtime", ["iree", "onnxruntime"])
def test_sandbox_isolates_worker_and_returns_correct_outputs(start_agent, open_client, add_programs, runtime):
    client = open_client(start_agent(module="hil.sim"))
    add = add_programs[runtime]
    add.push(client)
    loaded = add.load(client)
    outputs = client.invoke(loaded.program_id, {"a": A, "b": A}, timeout=60).outputs
    assert (next(iter(outputs.values())) == A + A).all()
    worker = Path(f"/proc/{loaded.worker_pid}")
    status = dict(line.split(":\t") for line in (worker / "status").read_text().splitlines() if ":\t" in line)
    assert (status["Seccomp"], status["NoNewPrivs"], int(status["CapEff"], 16)) == ("2", "1", 0)
    for space in ("net", "mnt", "user", "ipc"):
        assert (worker / "ns" / space).readlink() != Path(f"/proc/self/ns/{space}").readlink()


def test_agents_and_sandbox_off_option_run_without_sandbox(start_agent, open_client, add_programs):
    for words, module in ((("--sandbox", "off"), "hil.sim"), ((), "hil.agent")):
        client = open_client(start_agent(*words, module=module))
        add_programs["onnxruntime"].push(client)
        loaded = add_programs["onnxruntime"].load(client)
        assert Path(f"/proc/{loaded.worker_pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink()


def test_sandbox_flag_fails_without_namespaces(hil, doubling):
    # A simulated clock is shared with the agent, which the sandbox does not allow.
    words = ("run", doubling, "--runtime-hw-type", "sim", "--fault", "clock")
    ended = hil(*words, "--sandbox")
    assert ended.code == 2 and "sandbox unavailable" in ended.err and "--no-sandbox" in ended.err
    ended = hil(*words, "--json")
    assert ended.code == 0 and any("not sandboxed" in one for one in json.dumps(ended.document).split('"')), ended.out
    assert "not sandboxed" not in json.dumps(hil(*words, "--no-sandbox", "--json").document)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("runtime", ["iree", "onnxruntime"])
def test_sandboxed_program_can_be_profiled(hil, doubling, tmp_path, runtime):
    words = ("--runtime", runtime, "--profile", tmp_path / "profiled", "--json")
    ended = hil("run", doubling, "--runtime-hw-type", "sim", "--sandbox", *words)
    assert ended.code == 0 and "operations not profiled" not in json.dumps(ended.document), ended.out
