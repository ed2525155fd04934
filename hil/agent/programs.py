"""Loaded programs of the current session, each in a separate worker; the load policy; and call inputs.

With a :class:`Policy`, an agent loads only programs from bundles signed by a trusted key. A program from a signed
bundle includes an additional file: the bundle's header and manifest. The manifest lists the digests of the program's
other files and contains the signature, so the agent can verify every byte.
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
from hil.agent.ipc import Arena, align_offset
from hil.agent.session import Session, Sessions
from hil.agent.store import BlobStore
from hil.agent.supervisor import Supervisor, WorkerProcess
from hil.bundles.layout import MAX_HEAD_BYTES, read_head
from hil.bundles.manifest import read_program_files
from hil.bundles.signature import SEAL, verify
from hil.core import clock
from hil.core.digest import Hasher
from hil.core.files import open_file
from hil.core.results import Part
from hil.core.tensors import TensorSpec, check_names, count_bytes
from hil.errors import BoardUnfit, LoadFailed, RunCrashed, RunFailed, SessionEnded, StageTimeout, UsageError
from hil.protocol import wire, wire_steps
from hil.protocol.v1 import agent_pb2 as pb

# Maximum number of loaded programs. A test run with many traced modules loads a program for each module.
MAX_PROGRAMS = 512
MAX_FILES = 10_000
MAX_INPUTS = 20_000
# Every numpy version supports this many dimensions.
_MAX_DIMS = 32
MAX_ITERATIONS = 1_000_000
MAX_TIMEOUT_SECONDS = 24 * 3600.0
# Maximum wait for the current calls of unloaded programs. A call that waits for data from a dead controller blocks its
# program until the connection ends.
_RELEASE_SECONDS = 5.0
# Interval at which a call that waits for a program checks that the client is still connected.
_LOOK_SECONDS = 0.2
_HINT = "sign the bundle with a trusted key (hil bundle create --sign KEY) and run it with hil bundle run"


@dataclass
class WorkerProgram:
    """Program in a worker."""

    worker: WorkerProcess
    session: Session
    folder: Path
    pinned: list[str]
    inputs_bytes: int = 0
    # Outputs in the worker's arena for each distinct result of the last call; None if not stored.
    kept: list[tuple[Output, ...] | None] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get_stored_outputs(self, number: int) -> tuple[Output, ...]:
        """Return the stored outputs of distinct result ``number`` of the last call, counted from 1.

        Raises:
            UsageError: the outputs are not stored.
        """
        outputs = self.kept[number - 1] if number <= len(self.kept) else None
        if outputs is None:
            raise UsageError(f"the agent did not store output set {number} of the last call")
        return outputs


@dataclass(eq=False)
class Loading:
    """Load in progress, with the worker after the start."""

    worker: WorkerProcess | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Programs:
    """Loaded programs. Programs are unloaded when their session ends.

    Args:
        store: store with the program files.
        supervisor: source of workers.
        sessions: sessions of the agent.
        memory_limit: maximum memory of a program with its tensors, in bytes; 0 means the machine's memory.
        policy: restricts which programs may be loaded; None allows all.
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
        self._limit = memory_limit or machine.get_memory_limit() or 1 << 62
        self._loaded: dict[str, WorkerProgram] = {}
        self._loading: set[Loading] = set()
        # Number of programs that the session has loaded, and the last runtime.
        self._loads, self._runtime = 0, ""
        self._freeing: list[threading.Thread] = []
        self._lock = threading.Lock()

    def load(self, session: Session, request: pb.LoadRequest) -> pb.LoadReply:
        """Start a worker and load a program in it.

        Raises:
            LoadFailed, RunCrashed, StageTimeout: the worker failed.
            BoardUnfit: the board's runtime, device, disk or memory failed.
            SessionEnded: the session ended during the load.
        """
        loading = Loading()
        with self._lock:
            self._sessions.require(session)
            if len(self._loaded) + len(self._loading) >= MAX_PROGRAMS:
                raise LoadFailed(f"{MAX_PROGRAMS} programs are already loaded", hint="unload some programs first")
            self._loading.add(loading)
        try:
            with self._sessions.journal.record_operation("load", fence=session.fence) as noted:
                reply = self._load(session, request, loading)
                noted["program"] = reply.program_id
        finally:
            with self._lock:
                self._loading.remove(loading)
            loading.done.set()
        return reply

    def _load(self, session: Session, request: pb.LoadRequest, loading: Loading) -> pb.LoadReply:
        if len(request.files) > MAX_FILES:
            raise UsageError(f"a program has {len(request.files)} files, maximum {MAX_FILES}")
        names = [file.name for file in request.files]
        if request.main not in names:
            raise UsageError(f"main file {request.main[:100]!r} is missing from the program's files")
        if self._policy is not None:
            self._policy.check_load(request, self._store)

        def list_files() -> Iterator[tuple[str, str]]:
            for file in request.files:
                # Linking many files takes time, so check the session before each file.
                self._sessions.require(session)
                yield file.name, file.digest

        folder, pinned = self._store.link_program(list_files())
        worker = None
        try:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            self._check_memory(size, "the program")
            worker = self._supervisor.take(request.runtime, request.device, instructions=request.instructions)
            with self._lock:
                self._sessions.require(session)
                loading.worker = worker
                self._loads, self._runtime = self._loads + 1, request.runtime
            worker.program_id = uuid.uuid4().hex
            order = {name: getattr(request, name) for name in ("main", "device", "function")} | {"folder": str(folder)}

            def refill_spares() -> None:
                # Start the next worker now: later, the preparation would take CPU time from a timed run.
                if self._supervisor.has(request.runtime, request.device):
                    self._refill(session, request)

            try:
                found = worker.load(order, _clamp_timeout(request.timeout_s), meanwhile=refill_spares)
            except LoadFailed as error:
                if missing := self._supervisor.check_device(request.runtime, request.device):
                    missing.detail = error.message
                    raise missing from error
                raise
            check_names(found.inputs, found.outputs)
            known = sum(_compute_known_size(spec) for spec in (*found.inputs, *found.outputs))
            self._check_memory(size + known, "the program with all inputs and outputs")
            with self._lock:
                self._sessions.require(session)
                self._loaded[worker.program_id] = WorkerProgram(worker, session, folder, pinned)
        except BaseException:
            if worker is not None:
                worker.close()
            self._store.unlink_program(folder, pinned)
            raise
        with contextlib.suppress(SessionEnded):
            self._refill(session, request)  # the device works even if the runtime does not list it
        return pb.LoadReply(
            program_id=worker.program_id,
            device=request.device,
            function=found.function,
            inputs=[wire.encode_spec(spec) for spec in found.inputs],
            outputs=[wire.encode_spec(spec) for spec in found.outputs],
            load_ns=found.load_ns,
            worker_pid=worker.pid,
        )

    def _refill(self, session: Session, request: pb.LoadRequest) -> None:
        """Prepare a worker for the session's next program.

        Skip this for the first program: many sessions load only a single program.
        """
        with self._lock:
            if self._loads < 2:
                return
            # The end of the session takes this lock before it stops spare workers, so none is created after that.
            self._sessions.require(session)
            self._supervisor.refill(request.runtime, request.device)

    @contextlib.contextmanager
    def lock_program(
        self, session: Session, start: pb.InvokeStart, is_wanted: Callable[[], bool]
    ) -> Iterator[WorkerProgram]:
        """Lock and return the program of a call.

        Args:
            session: session of the call.
            start: first message of the call.
            is_wanted: returns False when the client has disconnected.

        Raises:
            SessionEnded: the session has ended, or the client disconnected while waiting.
            UsageError: the program is not loaded, the counts are invalid, or the call has too many inputs.
        """
        loaded = self._loaded.get(start.program_id)
        if loaded is None or loaded.session is not session:
            raise self._make_absent_error(session)
        if not (start.recall or 1 <= start.iterations <= MAX_ITERATIONS) or start.warmup > MAX_ITERATIONS:
            raise UsageError(f"iterations must be 1 to {MAX_ITERATIONS}, warm-up 0 to {MAX_ITERATIONS}")
        # Check before waiting: a parsed input takes up to a hundred times the size in the message.
        if len(start.inputs) > MAX_INPUTS or any(len(tensor.shape) > _MAX_DIMS for tensor in start.inputs):
            raise UsageError(f"a call can have at most {MAX_INPUTS} inputs, with at most {_MAX_DIMS} dimensions each")
        while not loaded.lock.acquire(timeout=_LOOK_SECONDS):
            if not is_wanted():
                raise SessionEnded("the call was cancelled while waiting for the program")
        try:
            # The program may have been unloaded during the wait.
            if self._loaded.get(start.program_id) is not loaded:
                raise self._make_absent_error(session)
            yield loaded
        finally:
            loaded.lock.release()

    def _make_absent_error(self, session: Session) -> UsageError:
        # A stream may send a call long after the session check. If the session has ended, report that.
        self._sessions.require(session)
        return UsageError("program not loaded in this session", hint="load the program first")

    def reserve_inputs(self, loaded: WorkerProgram, start: pb.InvokeStart) -> InputReceiver:
        """Reserve memory for a call's inputs. Raises RunFailed if the inputs exceed the board's memory."""

        def reserve(size: int) -> None:
            # The input memory of a program never shrinks; the next call reuses it.
            if size <= loaded.inputs_bytes:
                return
            with self._lock:
                others = sum(one.inputs_bytes for one in self._loaded.values() if one is not loaded)
                if size + others > self._limit:
                    beside = f" in addition to {others} bytes of other programs' inputs" if others else ""
                    raise RunFailed(
                        f"the inputs need {size} bytes{beside}, more than the board's {self._limit} bytes of memory"
                    )
                loaded.inputs_bytes = size

        return InputReceiver(loaded.worker.inputs, start, self._store, reserve)

    def invoke(
        self, loaded: WorkerProgram, incoming: InputReceiver, start: pb.InvokeStart
    ) -> tuple[pb.InvokeReply, list[memoryview], Callable[[], None]]:
        """Run or profile a program on received inputs.

        Returns:
            The response, the outputs to stream after it, and a function that writes the end to the journal. Call this
            function while the client reads the response. Errors are written to the journal here.

        Raises:
            RunFailed, RunCrashed, StageTimeout: the worker failed; a program with a dead worker is unloaded.
            BoardUnfit: other processes used up the memory, or the clock stepped back; the program is unloaded.
        """
        received = clock.get_time_ns()
        if start.recall:
            reply = pb.InvokeReply()
            return (
                reply,
                self._add_outputs(loaded.worker, loaded.get_stored_outputs(start.recall), reply.done),
                lambda: None,
            )
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
        if start.HasField("steps"):
            order |= {"op": "generate", "steps": wire_steps.decode_steps(start.steps).to_json()}
        timeout = _clamp_timeout(start.timeout_s)
        note = partial(self._sessions.journal.note, fence=loaded.session.fence, program=start.program_id)
        ended = partial(note, f"{order['op']} ended")
        try:
            # Write the start to the journal while the worker reads the order.
            ran = loaded.worker.run(order, timeout, meanwhile=partial(note, f"{order['op']} begins"))
            reply, streams = self._build_reply(loaded.worker, ran, received, start.state)
            if ran.repetition is not None:
                loaded.kept = [answer.outputs for answer in ran.repetition.answers]
        except BaseException as error:
            ended(error=type(error).__name__)
            if isinstance(error, (RunCrashed, StageTimeout, BoardUnfit)):
                with self._lock:
                    is_ours = self._loaded.pop(start.program_id, None) is not None
                if is_ours:
                    self._release(loaded)
            raise
        return reply, streams, ended

    def _build_reply(
        self, worker: WorkerProcess, ran: Ran, received: int, with_state: bool
    ) -> tuple[pb.InvokeReply, list[memoryview]]:
        """Build the response to a run, and the list of outputs to stream after it."""
        reply = pb.InvokeReply()
        done = reply.done  # fill in place: assigning a message would copy it
        done.received_ns, done.peak_memory_bytes = received, ran.peak_bytes
        done.warmup_ns, done.cpu_ns = ran.warmup_ns, ran.cpu_ns
        done.peak_device_memory_bytes = ran.device_bytes
        done.start_ns.extend(ran.start_ns)
        done.end_ns.extend(ran.end_ns)
        if ran.placement is not None:
            done.placement.CopyFrom(pb.Placement(parts=map(_make_part_message, ran.placement)))
        if ran.repetition is not None:
            done.repetition.CopyFrom(_make_repetition_message(ran.repetition))
        done.calls.extend(pb.StepCall(**vars(call)) for call in ran.calls)
        if ran.instructions is not None:
            done.instructions.CopyFrom(pb.Instructions(**vars(ran.instructions)))
        streams = self._add_outputs(worker, ran.outputs, done)
        if with_state:
            state = pb.State(clock_ns=clock.get_time_ns(), wall_ns=time.time_ns(), readings=machine.collect_readings())
            done.state.CopyFrom(state)
        done.ready_ns = clock.get_time_ns()
        return reply, streams

    def _add_outputs(self, worker: WorkerProcess, outputs: Sequence[Output], done: pb.InvokeDone) -> list[memoryview]:
        """Add outputs to a response, and return the outputs to stream after the response.

        Raises RunFailed if the outputs exceed the memory limit.
        """
        size = max((output.end for output in outputs), default=0)
        if sum(output.size for output in outputs) > self._limit:
            raise RunFailed(f"the outputs need {size} bytes, more than the board's {self._limit} bytes of memory")
        view = worker.view_outputs(size)
        streams: list[memoryview] = []
        left = wire.INLINE_TOTAL
        for output in outputs:
            data, most = view[output.at : output.end], min(left, wire.INLINE_SENT)
            message, streamed = wire.encode_tensor(output.name, output.dtype, output.shape, data, most)
            done.outputs.append(message)
            if streamed:
                streams.append(data)
            else:
                left -= data.nbytes
        return streams

    def list_worker_pids(self) -> list[int]:
        """Return the worker process ids of all loaded programs."""
        return [loaded.worker.pid for loaded in list(self._loaded.values())]

    def unload(self, session: Session, program_id: str) -> None:
        """Unload a program. Unknown programs are ignored."""
        with self._lock:
            loaded = self._loaded.get(program_id)
            if loaded is None or loaded.session is not session:
                return
            # Do not wait for the killed process here; the end of the session waits for it.
            self._release_program(program_id)

    def unload_all(self, because: SessionEnded) -> bool:
        """Unload all programs at the end of the session.

        Returns:
            True if the session had loaded programs and all of them were released in time.
        """
        with self._lock:
            for program_id in list(self._loaded):
                self._release_program(program_id, because)
            freeing, loads = self._freeing, list(self._loading)
            had_any, self._loads = self._loads > 0, 0
            for load in loads:
                if load.worker is not None:
                    load.worker.kill(because)
        if had_any:
            self._supervisor.end_spares()
        deadline = time.monotonic() + _RELEASE_SECONDS
        for one in freeing:
            one.join(max(deadline - time.monotonic(), 0.0))
        for load in loads:
            load.done.wait(max(deadline - time.monotonic(), 0.0))
        self._supervisor.logs.forget()
        self._store.forget_session()
        is_left = any(one.is_alive() for one in freeing) or not all(load.done.is_set() for load in loads)
        return had_any and not is_left

    def prepare_next_session(self) -> None:
        """Prepare a worker for the next session. Call this only after a session that released everything."""
        self._supervisor.prepare_spare(self._runtime)

    def _release_program(self, program_id: str, because: SessionEnded | None = None) -> None:
        """Kill a program's worker and release the resources in a thread. The caller must have acquired ``_lock``."""
        loaded = self._loaded.pop(program_id)
        loaded.worker.kill(because)
        freeing = threading.Thread(target=self._free, args=(loaded,), daemon=True)
        freeing.start()
        self._freeing = [one for one in self._freeing if one.is_alive()] + [freeing]

    def _free(self, loaded: WorkerProgram) -> None:
        """Release a killed program's resources after the current call has ended."""
        with loaded.lock:
            self._release(loaded)

    def _release(self, loaded: WorkerProgram) -> None:
        loaded.worker.close()
        self._store.unlink_program(loaded.folder, loaded.pinned)

    def _check_memory(self, needed: int, what: str) -> None:
        if needed > self._limit:
            raise LoadFailed(
                f"{what} needs {needed} bytes, more than the board's {self._limit} bytes of memory",
                hint="use a smaller model, or a board with more memory",
            )


def _make_part_message(part: Part) -> pb.Part:
    return pb.Part(**{**part.to_json(), "reasons": [pb.PlacementReason(**one.to_json()) for one in part.reasons]})


def _make_repetition_message(found: Repeated) -> pb.Repetition:
    answers = [pb.RepeatedAnswer(runs=one.runs, first=one.first, kept=one.outputs is not None) for one in found.answers]
    return pb.Repetition(answers=answers, sampled=found.sampled, others=found.others, differing=found.differing)


def _compute_known_size(spec: TensorSpec) -> int:
    dims = [dim for dim in spec.shape if isinstance(dim, int)]
    return count_bytes(spec.dtype, dims) if spec.dtype and len(dims) == len(spec.shape) else 0


def _clamp_timeout(seconds: float) -> float:
    if not seconds >= 0:
        raise UsageError(f"invalid time limit {seconds:g} s")
    return min(seconds, MAX_TIMEOUT_SECONDS) if seconds > 0 else MAX_TIMEOUT_SECONDS


class InputReceiver:
    """Inputs of one call, received into the worker's shared memory.

    Args:
        arena: input arena of the worker.
        start: first message of the call.
        store: store with the inputs that are sent as blobs.
        reserve: called with the total size in bytes before memory is allocated; raises if that is too large.

    Raises:
        UsageError: an inline tensor is too large.
        RunFailed: the inputs exceed the available memory.
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
                    raise UsageError(f"an inline tensor has {size} bytes, maximum {wire.INLINE_MAX}")
                here.append((at, size, tensor.inline))
            entry = {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "at": at, "bytes": size}
            self.entries.append(entry)
            at += align_offset(size)
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
        """Whether any input is streamed, which means that digests follow."""
        return bool(self._streams)

    def add(self, data: memoryview) -> None:
        """Store the next streamed bytes.

        A message never spans two tensors. Raises UsageError if the bytes exceed the announced size.
        """
        offset, size = self._streams[self._current]
        if self._done + data.nbytes > size or not data.nbytes:
            raise UsageError("the streamed data does not match the announced tensors")
        at = offset + self._done
        self._view[at : at + data.nbytes] = data
        # Hash the received bytes instead of the shared memory, which a running program may still modify.
        self._hashers[self._current].update(data)
        self._done += data.nbytes
        if self._done == size:
            self._current += 1
            self._done = 0

    def verify(self, digests: list[str]) -> None:
        """Compare the received data with the sender's digests. Raises UsageError on a mismatch."""
        if [hasher.digest() for hasher in self._hashers] != digests:
            raise UsageError("inputs corrupted in transfer: digest mismatch")


def _read(path: Path, target: memoryview) -> None:
    with open_file(path) as file:
        while target.nbytes and (count := file.readinto(target)):
            target = target[count:]
    if target.nbytes:
        raise RunFailed(f"{path.name} was truncated")


@dataclass(frozen=True)
class Policy:
    """Policy that allows only programs of bundles signed by a trusted key."""

    trusted: tuple[bytes, ...]

    def check_load(self, request: pb.LoadRequest, store: BlobStore) -> None:
        """Check that a program matches a trusted bundle exactly. Raises LoadFailed otherwise."""
        files = {file.name: file.digest for file in request.files}
        seal = files.pop(SEAL, "")
        if not seal:
            raise LoadFailed(
                "this board runs only programs of signed bundles, and this program is not signed", hint=_HINT
            )
        try:
            with open_file(store.path(seal)) as file:
                head = read_head(memoryview(file.read(MAX_HEAD_BYTES)))
            verify(head, self.trusted)
            signed, main, runtime, methods = read_program_files(head.parse_document())
        except UsageError as error:
            raise LoadFailed(f"this board runs only programs of signed bundles: {error.message}", hint=_HINT) from error
        asked = (files, request.main, request.runtime)
        if asked != (signed, main, runtime) or len(files) + 1 != len(request.files) or request.function not in methods:
            raise LoadFailed(
                "this board runs only programs of signed bundles: the program differs from the signed program",
                hint=_HINT,
            )

    def check_profile(self, tool: str) -> None:
        """Raise RunFailed for an uploaded profiler, because such a profiler is unsigned.

        Args:
            tool: digest of the uploaded profiler; "" for the runtime's own profiler on the board.
        """
        if tool:
            raise RunFailed(
                "this board runs only programs of signed bundles, and the uploaded profiler is not signed",
                hint="install the runtime's profiler on the board",
            )
