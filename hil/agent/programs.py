"""The programs that the current session has loaded, each in a worker of its own; which are allowed, and their inputs.

With a :class:`Policy` an agent loads only programs of bundles that a trusted key has signed. A program out of a signed
bundle comes with one file more: the bundle's header and manifest, which name the program's other files by their digests
and carry the signature. The agent needs nothing else to know that each byte is signed.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hil.agent import machine
from hil.agent.answers import Output, Ran, Repeated
from hil.agent.ipc import Arena, aligned
from hil.agent.session import Session, Sessions
from hil.agent.store import BlobStore
from hil.agent.supervisor import Supervisor, Worker
from hil.bundles.layout import MAX_HEAD_BYTES, read_head
from hil.bundles.manifest import program_files
from hil.bundles.signature import SEAL, verify
from hil.core import clock
from hil.core.digest import Hasher
from hil.core.tensors import TensorSpec, check_names, nbytes_of
from hil.errors import LoadFailed, RunCrashed, RunFailed, SessionEnded, StageTimeout, UsageError
from hil.protocol import wire
from hil.protocol.v1 import agent_pb2 as pb

# A test session of many traced modules keeps a program for each.
MAX_PROGRAMS = 512
MAX_FILES = 10_000
MAX_INPUTS = 20_000
# As many as every numpy takes.
_MAX_DIMS = 32
MAX_ITERATIONS = 1_000_000
MAX_TIMEOUT_S = 24 * 3600.0
# A call that waits for a dead controller's data holds its program until its connection ends: nobody waits for that.
_LET_GO_S = 5.0
# How soon a call that waits for its program notices that nobody waits for it any more.
_LOOK_S = 0.2
_HINT = "sign the bundle with a trusted key (hil bundle create --sign KEY) and run it with hil bundle run"


@dataclass
class Loaded:
    """A program in its worker."""

    worker: Worker
    session: Session
    folder: Path
    pinned: list[str]
    inputs_bytes: int = 0
    # The outputs of each distinct answer of the last call, in the worker's arena; None where they were not kept.
    kept: list[tuple[Output, ...] | None] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def recall(self, number: int) -> tuple[Output, ...]:
        """Return the outputs of a distinct answer of the last call, from 1 on. Raises UsageError: it has none kept."""
        outputs = self.kept[number - 1] if number <= len(self.kept) else None
        if outputs is None:
            raise UsageError(f"the outputs of answer {number} of the last call are not kept")
        return outputs


@dataclass(eq=False)
class Loading:
    """A load in progress, and its worker once it has one."""

    worker: Worker | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Programs:
    """Loading, calling and unloading; everything goes when its session does.

    Args:
        memory_limit: most that a program with its tensors may take, in bytes; 0 is the machine's memory.
        policy: which programs may be loaded; None is any.
    """

    def __init__(
        self,
        store: BlobStore,
        supervisor: Supervisor,
        sessions: Sessions,
        memory_limit: int = 0,
        policy: Policy | None = None,
    ) -> None:
        self._store = store
        self._policy = policy
        self._supervisor = supervisor
        self._sessions = sessions
        self._limit = memory_limit or machine.memory_bytes() or 1 << 62
        self._loaded: dict[str, Loaded] = {}
        self._loading: set[Loading] = set()
        # How often the session has had a program loaded; and by which runtime one was last.
        self._loads, self._runtime = 0, ""
        self._freeing: list[threading.Thread] = []
        self._lock = threading.Lock()

    def load(self, session: Session, request: pb.LoadRequest) -> pb.LoadReply:
        """Start a worker and load a program in it.

        Raises:
            LoadFailed, RunCrashed, StageTimeout: as the worker ends.
            SessionEnded: the session is over, and the load with it.
        """
        loading = Loading()
        with self._lock:
            self._sessions.require(session)
            if len(self._loaded) + len(self._loading) >= MAX_PROGRAMS:
                raise LoadFailed(f"{MAX_PROGRAMS} programs are loaded already", hint="unload some first")
            self._loading.add(loading)
        try:
            with self._sessions.journal.during("load", fence=session.fence) as noted:
                reply = self._load(session, request, loading)
                noted["program"] = reply.program_id
        finally:
            with self._lock:
                self._loading.remove(loading)
            loading.done.set()
        return reply

    def _load(self, session: Session, request: pb.LoadRequest, loading: Loading) -> pb.LoadReply:
        if len(request.files) > MAX_FILES:
            raise UsageError(f"a program has {len(request.files)} files, and {MAX_FILES} are the most")
        names = [file.name for file in request.files]
        if request.main not in names:
            raise UsageError(f"the program's main file {request.main[:100]!r} is not among its files")
        if self._policy is not None:
            self._policy.check_load(request, self._store)

        def files() -> Iterator[tuple[str, str]]:
            for file in request.files:
                # They may be many, and each may have folders of its own.
                self._sessions.require(session)
                yield file.name, file.digest

        folder, pinned = self._store.link_program(files())
        worker = None
        try:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            self._check_memory(size, "the program")
            worker = self._supervisor.take(request.runtime, request.device)
            with self._lock:
                self._sessions.require(session)
                loading.worker = worker
                self._loads, self._runtime = self._loads + 1, request.runtime
            worker.program_id = uuid.uuid4().hex
            order = {name: getattr(request, name) for name in ("main", "device", "function")} | {"folder": str(folder)}

            def meanwhile() -> None:
                # Later, making the next one's worker ready would take its time from a timed run.
                if self._supervisor.has(request.runtime, request.device):
                    self._refill(session, request)

            found = worker.load(order, _timeout(request.timeout_s), meanwhile=meanwhile)
            check_names(found.inputs, found.outputs)
            known = sum(_known_size(spec) for spec in (*found.inputs, *found.outputs))
            self._check_memory(size + known, "the program with its inputs and outputs")
            with self._lock:
                self._sessions.require(session)
                self._loaded[worker.program_id] = Loaded(worker, session, folder, pinned)
        except BaseException:
            if worker is not None:
                worker.close()
            self._store.unlink_program(folder, pinned)
            raise
        with contextlib.suppress(SessionEnded):
            self._refill(session, request)  # a device that is there, although the runtime may not list it
        return pb.LoadReply(
            program_id=worker.program_id,
            device=request.device,
            function=found.function,
            inputs=[wire.spec_to_message(spec) for spec in found.inputs],
            outputs=[wire.spec_to_message(spec) for spec in found.outputs],
            load_ns=found.load_ns,
            worker_pid=worker.pid,
        )

    def _refill(self, session: Session, request: pb.LoadRequest) -> None:
        """Have a worker made ready for the session's next program; many sessions have only one."""
        with self._lock:
            if self._loads < 2:
                return
            # Under the lock that its end takes before it ends what is kept ready: none is made for it after that.
            self._sessions.require(session)
            self._supervisor.refill(request.runtime, request.device)

    @contextlib.contextmanager
    def called(self, session: Session, start: pb.InvokeStart, is_wanted: Callable[[], bool]) -> Iterator[Loaded]:
        """The program that a call is for, which nobody else calls meanwhile.

        Args:
            is_wanted: whether the caller still waits for it.

        Raises:
            SessionEnded: the session is over.
            UsageError: there is no such program, or the counts make no sense, or there are too many inputs.
        """
        loaded = self._loaded.get(start.program_id)
        if loaded is None or loaded.session is not session:
            raise self._absent(session)
        if not (start.recall or 1 <= start.iterations <= MAX_ITERATIONS) or start.warmup > MAX_ITERATIONS:
            raise UsageError(f"iterations must be 1 to {MAX_ITERATIONS}, warm-up 0 to {MAX_ITERATIONS}")
        # Before it waits: read, an input takes a hundred times the bytes that it may have in a message.
        if len(start.inputs) > MAX_INPUTS or any(len(tensor.shape) > _MAX_DIMS for tensor in start.inputs):
            raise UsageError(f"a call has at most {MAX_INPUTS} inputs of at most {_MAX_DIMS} dimensions")
        while not loaded.lock.acquire(timeout=_LOOK_S):
            if not is_wanted():
                raise SessionEnded("the call was broken off while it waited for the program")
        try:
            # It may have been freed while we waited for it.
            if self._loaded.get(start.program_id) is not loaded:
                raise self._absent(session)
            yield loaded
        finally:
            loaded.lock.release()

    def _absent(self, session: Session) -> UsageError:
        # A call may follow another one on its stream long after the session was looked at: its end is the reason then.
        self._sessions.require(session)
        return UsageError("no such program is loaded in this session", hint="load it (again) first")

    def incoming(self, loaded: Loaded, start: pb.InvokeStart) -> Incoming:
        """Make room for a call's inputs. Raises RunFailed: they are too large for the board."""

        def reserve(size: int) -> None:
            # The memory of a program's inputs is kept for its next call: it never shrinks.
            if size <= loaded.inputs_bytes:
                return
            with self._lock:
                others = sum(one.inputs_bytes for one in self._loaded.values() if one is not loaded)
                if size + others > self._limit:
                    beside = f" beside the {others} bytes of other programs' inputs" if others else ""
                    raise RunFailed(
                        f"the inputs take {size} bytes{beside}, more than the board's {self._limit} bytes of memory"
                    )
                loaded.inputs_bytes = size

        return Incoming(loaded.worker.inputs, start, self._store, reserve)

    def invoke(
        self, loaded: Loaded, incoming: Incoming, start: pb.InvokeStart
    ) -> tuple[pb.InvokeReply, list[memoryview], Callable[[], None]]:
        """Run (or profile) a program on inputs that have come.

        Returns the answer, the outputs to stream after it, and what writes into the journal that it has ended: there is
        time for that while the answer is read. An error is noted here.

        Raises:
            RunFailed, RunCrashed, StageTimeout: as the worker ends; a worker that died is unloaded.
        """
        received = clock.now_ns()
        if start.recall:
            reply = pb.InvokeReply()
            return reply, self._tensors(loaded.worker, loaded.recall(start.recall), reply.done), lambda: None
        loaded.kept = []
        order = {
            "op": "invoke",
            "bytes": incoming.size,
            "inputs": incoming.entries,
            "warmup": start.warmup,
            "iterations": start.iterations,
        }
        if start.HasField("profile"):
            tool = start.profile.tool
            if self._policy is not None:
                self._policy.check_profile(tool)
            order |= {"op": "profile", "tool": str(self._store.path(tool)) if tool else "", "limit": self._limit}
        timeout = _timeout(start.timeout_s)
        note = partial(self._sessions.journal.note, fence=loaded.session.fence, program=start.program_id)
        ended = partial(note, f"{order['op']} ended")
        try:
            # That it begins is noted while the worker reads the order.
            ran = loaded.worker.run(order, timeout, meanwhile=partial(note, f"{order['op']} begins"))
            reply, streams = self._answer(loaded.worker, ran, received, start.state)
            if ran.repetition is not None:
                loaded.kept = [answer.outputs for answer in ran.repetition.answers]
        except BaseException as error:
            ended(error=type(error).__name__)
            if isinstance(error, (RunCrashed, StageTimeout)):
                with self._lock:
                    is_ours = self._loaded.pop(start.program_id, None) is not None
                if is_ours:
                    self._release(loaded)
            raise
        return reply, streams, ended

    def _answer(
        self, worker: Worker, ran: Ran, received: int, with_state: bool
    ) -> tuple[pb.InvokeReply, list[memoryview]]:
        """What a run gave, as an answer, and the outputs to stream after it."""
        reply = pb.InvokeReply()
        done = reply.done  # filled where it is: put in as a whole, it would be copied
        done.received_ns, done.peak_memory_bytes = received, ran.peak_bytes
        done.warmup_ns, done.cpu_ns = ran.warmup_ns, ran.cpu_ns
        done.start_ns.extend(ran.start_ns)
        done.end_ns.extend(ran.end_ns)
        if ran.placement is not None:
            parts = [pb.Part(**part.to_json()) for part in ran.placement]
            done.placement.CopyFrom(pb.Placement(parts=parts))
        if ran.repetition is not None:
            done.repetition.CopyFrom(_repetition_message(ran.repetition))
        streams = self._tensors(worker, ran.outputs, done)
        if with_state:
            state = pb.State(clock_ns=clock.now_ns(), wall_ns=time.time_ns(), readings=machine.readings())
            done.state.CopyFrom(state)
        done.ready_ns = clock.now_ns()
        return reply, streams

    def _tensors(self, worker: Worker, outputs: Sequence[Output], done: pb.InvokeDone) -> list[memoryview]:
        """Add outputs to an answer; return those to stream after it. Raises RunFailed: they are too large."""
        size = max((output.end for output in outputs), default=0)
        if sum(output.size for output in outputs) > self._limit:
            raise RunFailed(f"the outputs take {size} bytes and the board has {self._limit}")
        view = worker.output_view(size)
        streams: list[memoryview] = []
        left = wire.INLINE_TOTAL
        for output in outputs:
            data, most = view[output.at : output.end], min(left, wire.INLINE_SENT)
            message, streamed = wire.tensor_to_message(output.name, output.dtype, output.shape, data, most)
            done.outputs.append(message)
            if streamed:
                streams.append(data)
            else:
                left -= data.nbytes
        return streams

    def worker_pids(self) -> list[int]:
        """The processes of the programs that are loaded."""
        return [loaded.worker.pid for loaded in list(self._loaded.values())]

    def unload(self, session: Session, program_id: str) -> None:
        """End a program's worker; nothing happens where there is none."""
        with self._lock:
            loaded = self._loaded.get(program_id)
            if loaded is None or loaded.session is not session:
                return
            # Nobody waits here until a killed process is gone; the end of the session does.
            self._let_go(program_id)

    def unload_all(self, because: SessionEnded) -> bool:
        """End every worker: the session is over.

        Returns:
            Whether it had any, and nothing is left of them.
        """
        with self._lock:
            for program_id in list(self._loaded):
                self._let_go(program_id, because)
            freeing, loads = self._freeing, list(self._loading)
            had_any, self._loads = self._loads > 0, 0
            for load in loads:
                if load.worker is not None:
                    load.worker.kill(because)
        if had_any:
            self._supervisor.end_spares()
        deadline = time.monotonic() + _LET_GO_S
        for one in freeing:
            one.join(max(deadline - time.monotonic(), 0.0))
        for load in loads:
            load.done.wait(max(deadline - time.monotonic(), 0.0))
        self._supervisor.logs.forget()
        self._store.forget_session()
        is_left = any(one.is_alive() for one in freeing) or not all(load.done.is_set() for load in loads)
        return had_any and not is_left

    def stand_by(self) -> None:
        """After a session of which nothing is left that could touch it: have a worker made ready for the next one."""
        self._supervisor.stand_by(self._runtime)

    def _let_go(self, program_id: str, because: SessionEnded | None = None) -> None:
        """End a program's worker, and give back what it held; under our lock, so that none is overlooked meanwhile."""
        loaded = self._loaded.pop(program_id)
        loaded.worker.kill(because)
        freeing = threading.Thread(target=self._free, args=(loaded,), daemon=True)
        freeing.start()
        self._freeing = [one for one in self._freeing if one.is_alive()] + [freeing]

    def _free(self, loaded: Loaded) -> None:
        """Give back what a killed program held, once a call in progress has seen its worker die and let go."""
        with loaded.lock:
            self._release(loaded)

    def _release(self, loaded: Loaded) -> None:
        loaded.worker.close()
        self._store.unlink_program(loaded.folder, loaded.pinned)

    def _check_memory(self, needed: int, what: str) -> None:
        if needed > self._limit:
            raise LoadFailed(
                f"{what} takes {needed} bytes and the board has {self._limit}",
                hint="a smaller model, or a board with more memory",
            )


def _repetition_message(found: Repeated) -> pb.Repetition:
    answers = [pb.RepeatedAnswer(runs=one.runs, first=one.first, kept=one.outputs is not None) for one in found.answers]
    return pb.Repetition(answers=answers, sampled=found.sampled, others=found.others, differing=found.differing)


def _known_size(spec: TensorSpec) -> int:
    dims = [dim for dim in spec.shape if isinstance(dim, int)]
    return nbytes_of(spec.dtype, dims) if spec.dtype and len(dims) == len(spec.shape) else 0


def _timeout(seconds: float) -> float:
    if not seconds >= 0:
        raise UsageError(f"a time limit cannot be {seconds:g} s")
    return min(seconds, MAX_TIMEOUT_S) if seconds > 0 else MAX_TIMEOUT_S


class Incoming:
    """The inputs of one call on their way into the worker's shared memory.

    Args:
        store: has the inputs that come as blobs.
        reserve: is told how many bytes they take before any memory is taken for them; raises where that is too much.

    Raises:
        UsageError: a tensor inside the message is larger than such may be.
        RunFailed: they take more than there is.
    """

    def __init__(self, arena: Arena, start: pb.InvokeStart, store: BlobStore, reserve: Callable[[int], None]) -> None:
        self.entries: list[dict[str, Any]] = []
        self._streams: list[tuple[int, int]] = []
        self._hashers: list[Hasher] = []
        here: list[tuple[int, int, bytes | Path]] = []
        at = 0
        for tensor in start.inputs:
            payload = tensor.WhichOneof("payload")
            if payload == "streamed":
                size = tensor.streamed
                self._streams.append((at, size))
                self._hashers.append(Hasher())
            elif payload == "blob":
                path = store.path(tensor.blob)
                size = path.stat().st_size
                here.append((at, size, path))
            else:
                size = len(tensor.inline)
                if size > wire.INLINE_MAX:
                    raise UsageError(f"a tensor inside a message has {size} bytes, and {wire.INLINE_MAX} are the most")
                here.append((at, size, tensor.inline))
            entry = {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "at": at, "bytes": size}
            self.entries.append(entry)
            at += aligned(size)
        reserve(at)
        self.size = at
        self._view = arena.view(at, grow=True)
        for offset, size, source in here:
            target = self._view[offset : offset + size]
            if isinstance(source, Path):
                _read(source, target)
            else:
                target[:] = source
        self._current = 0
        self._done = 0

    @property
    def wants_data(self) -> bool:
        """Whether streamed bytes are still missing."""
        return self._current < len(self._streams)

    @property
    def streamed(self) -> bool:
        """Whether anything was streamed, so that digests follow."""
        return bool(self._streams)

    def add(self, data: memoryview) -> None:
        """The next streamed bytes; a message never spans two tensors. Raises UsageError: more came than announced."""
        offset, size = self._streams[self._current]
        if self._done + data.nbytes > size or not data.nbytes:
            raise UsageError("the streamed data does not fit the tensors that were announced")
        at = offset + self._done
        self._view[at : at + data.nbytes] = data
        # What came, and not the memory: a program that still writes there would make it look damaged on its way.
        self._hashers[self._current].update(data)
        self._done += data.nbytes
        if self._done == size:
            self._current += 1
            self._done = 0

    def verify(self, digests: list[str]) -> None:
        """Compare what came with what was sent, as the sender says. Raises UsageError: it was damaged on its way."""
        if [hasher.digest() for hasher in self._hashers] != digests:
            raise UsageError("the inputs were damaged on their way to the board")


def _read(path: Path, target: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        while target.nbytes and (count := file.readinto(target)):
            target = target[count:]
    if target.nbytes:
        raise RunFailed(f"{path.name} is shorter than it was")


@dataclass(frozen=True)
class Policy:
    """Programs of bundles signed by one of these keys, and nothing else."""

    trusted: tuple[bytes, ...]

    def check_load(self, request: pb.LoadRequest, store: BlobStore) -> None:
        """Refuse a program that no trusted bundle holds just so. Raises LoadFailed: it is refused."""
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
        """Refuse a profiler that was sent here: it is a program that nobody signed. Raises RunFailed: it is refused."""
        if tool:
            raise RunFailed(
                "this board runs programs of signed bundles only, and the profiler that was sent is not signed",
                hint="install the runtime's own profiler on the board",
            )
