from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Error(_message.Message):
    __slots__ = ("kind", "message", "hint", "detail", "log", "code")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    hint: str
    detail: str
    log: str
    code: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., hint: _Optional[str] = ..., detail: _Optional[str] = ..., log: _Optional[str] = ..., code: _Optional[str] = ...) -> None: ...

class DataCall(_message.Message):
    __slots__ = ("method", "session", "token")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    method: str
    session: str
    token: str
    def __init__(self, method: _Optional[str] = ..., session: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("board_id", "name", "agent_version", "protocol", "machine", "runtimes", "clock_ns", "wall_ns", "fence", "holder", "memory_limit_bytes", "readings", "simulated", "build", "store_room_bytes", "stack", "meters")
    BOARD_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    RUNTIMES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    WALL_NS_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    READINGS_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    STORE_ROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    METERS_FIELD_NUMBER: _ClassVar[int]
    board_id: str
    name: str
    agent_version: str
    protocol: int
    machine: Machine
    runtimes: _containers.RepeatedCompositeFieldContainer[Runtime]
    clock_ns: int
    wall_ns: int
    fence: int
    holder: Holder
    memory_limit_bytes: int
    readings: _containers.RepeatedCompositeFieldContainer[Reading]
    simulated: _containers.RepeatedScalarFieldContainer[str]
    build: str
    store_room_bytes: int
    stack: _containers.RepeatedCompositeFieldContainer[StackPart]
    meters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, board_id: _Optional[str] = ..., name: _Optional[str] = ..., agent_version: _Optional[str] = ..., protocol: _Optional[int] = ..., machine: _Optional[_Union[Machine, _Mapping]] = ..., runtimes: _Optional[_Iterable[_Union[Runtime, _Mapping]]] = ..., clock_ns: _Optional[int] = ..., wall_ns: _Optional[int] = ..., fence: _Optional[int] = ..., holder: _Optional[_Union[Holder, _Mapping]] = ..., memory_limit_bytes: _Optional[int] = ..., readings: _Optional[_Iterable[_Union[Reading, _Mapping]]] = ..., simulated: _Optional[_Iterable[str]] = ..., build: _Optional[str] = ..., store_room_bytes: _Optional[int] = ..., stack: _Optional[_Iterable[_Union[StackPart, _Mapping]]] = ..., meters: _Optional[_Iterable[str]] = ...) -> None: ...

class Machine(_message.Message):
    __slots__ = ("hostname", "system", "kernel", "arch", "libc", "python", "cpu_model", "cpu_features", "cores", "memory_bytes", "boot_id", "cpu_parts")
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    LIBC_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    CPU_MODEL_FIELD_NUMBER: _ClassVar[int]
    CPU_FEATURES_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CPU_PARTS_FIELD_NUMBER: _ClassVar[int]
    hostname: str
    system: str
    kernel: str
    arch: str
    libc: str
    python: str
    cpu_model: str
    cpu_features: _containers.RepeatedScalarFieldContainer[str]
    cores: int
    memory_bytes: int
    boot_id: str
    cpu_parts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, hostname: _Optional[str] = ..., system: _Optional[str] = ..., kernel: _Optional[str] = ..., arch: _Optional[str] = ..., libc: _Optional[str] = ..., python: _Optional[str] = ..., cpu_model: _Optional[str] = ..., cpu_features: _Optional[_Iterable[str]] = ..., cores: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., boot_id: _Optional[str] = ..., cpu_parts: _Optional[_Iterable[str]] = ...) -> None: ...

class StackPart(_message.Message):
    __slots__ = ("name", "version", "source")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    source: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class Runtime(_message.Message):
    __slots__ = ("name", "version", "devices", "error", "profile_tool", "device_details")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROFILE_TOOL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_DETAILS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    error: str
    profile_tool: str
    device_details: _containers.RepeatedCompositeFieldContainer[RuntimeDevice]
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ..., error: _Optional[str] = ..., profile_tool: _Optional[str] = ..., device_details: _Optional[_Iterable[_Union[RuntimeDevice, _Mapping]]] = ...) -> None: ...

class RuntimeDevice(_message.Message):
    __slots__ = ("id", "name", "type", "driver", "properties")
    class PropertiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    type: str
    driver: str
    properties: _containers.ScalarMap[str, str]
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., type: _Optional[str] = ..., driver: _Optional[str] = ..., properties: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Reading(_message.Message):
    __slots__ = ("name", "value", "unit", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    unit: str
    text: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ..., unit: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ClockPing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClockPong(_message.Message):
    __slots__ = ("clock_ns",)
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    clock_ns: int
    def __init__(self, clock_ns: _Optional[int] = ...) -> None: ...

class CountersRequest(_message.Message):
    __slots__ = ("period_ms",)
    PERIOD_MS_FIELD_NUMBER: _ClassVar[int]
    period_ms: int
    def __init__(self, period_ms: _Optional[int] = ...) -> None: ...

class CounterSample(_message.Message):
    __slots__ = ("clock_ns", "readings")
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    READINGS_FIELD_NUMBER: _ClassVar[int]
    clock_ns: int
    readings: _containers.RepeatedCompositeFieldContainer[Reading]
    def __init__(self, clock_ns: _Optional[int] = ..., readings: _Optional[_Iterable[_Union[Reading, _Mapping]]] = ...) -> None: ...

class PowerRequest(_message.Message):
    __slots__ = ("kind", "path", "channel", "rate_hz")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    RATE_HZ_FIELD_NUMBER: _ClassVar[int]
    kind: str
    path: str
    channel: int
    rate_hz: float
    def __init__(self, kind: _Optional[str] = ..., path: _Optional[str] = ..., channel: _Optional[int] = ..., rate_hz: _Optional[float] = ...) -> None: ...

class PowerSamples(_message.Message):
    __slots__ = ("clock_ns", "values", "counts_energy", "lost")
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_ENERGY_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    clock_ns: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    counts_energy: bool
    lost: int
    def __init__(self, clock_ns: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ..., counts_energy: _Optional[bool] = ..., lost: _Optional[int] = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("program_id", "follow", "error")
    PROGRAM_ID_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    program_id: str
    follow: bool
    error: str
    def __init__(self, program_id: _Optional[str] = ..., follow: _Optional[bool] = ..., error: _Optional[str] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("clock_ns", "program_id", "text")
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    clock_ns: int
    program_id: str
    text: str
    def __init__(self, clock_ns: _Optional[int] = ..., program_id: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("owner", "purpose", "fence", "held_s")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    HELD_S_FIELD_NUMBER: _ClassVar[int]
    owner: str
    purpose: str
    fence: int
    held_s: float
    def __init__(self, owner: _Optional[str] = ..., purpose: _Optional[str] = ..., fence: _Optional[int] = ..., held_s: _Optional[float] = ...) -> None: ...

class HoldRequest(_message.Message):
    __slots__ = ("open", "keep_alive")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALIVE_FIELD_NUMBER: _ClassVar[int]
    open: SessionOpen
    keep_alive: KeepAlive
    def __init__(self, open: _Optional[_Union[SessionOpen, _Mapping]] = ..., keep_alive: _Optional[_Union[KeepAlive, _Mapping]] = ...) -> None: ...

class SessionOpen(_message.Message):
    __slots__ = ("owner", "purpose", "ttl_s", "fence", "wait_s")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    owner: str
    purpose: str
    ttl_s: float
    fence: int
    wait_s: float
    def __init__(self, owner: _Optional[str] = ..., purpose: _Optional[str] = ..., ttl_s: _Optional[float] = ..., fence: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class KeepAlive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HoldReply(_message.Message):
    __slots__ = ("waiting", "opened", "alive", "over")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    waiting: SessionWaiting
    opened: SessionOpened
    alive: KeepAlive
    over: SessionOver
    def __init__(self, waiting: _Optional[_Union[SessionWaiting, _Mapping]] = ..., opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., alive: _Optional[_Union[KeepAlive, _Mapping]] = ..., over: _Optional[_Union[SessionOver, _Mapping]] = ...) -> None: ...

class SessionWaiting(_message.Message):
    __slots__ = ("holder",)
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    holder: Holder
    def __init__(self, holder: _Optional[_Union[Holder, _Mapping]] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("token", "fence", "ttl_s")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    token: str
    fence: int
    ttl_s: float
    def __init__(self, token: _Optional[str] = ..., fence: _Optional[int] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class SessionOver(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class MissingRequest(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digests: _Optional[_Iterable[str]] = ...) -> None: ...

class MissingReply(_message.Message):
    __slots__ = ("missing",)
    MISSING_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedCompositeFieldContainer[MissingBlob]
    def __init__(self, missing: _Optional[_Iterable[_Union[MissingBlob, _Mapping]]] = ...) -> None: ...

class MissingBlob(_message.Message):
    __slots__ = ("digest", "have_bytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HAVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    have_bytes: int
    def __init__(self, digest: _Optional[str] = ..., have_bytes: _Optional[int] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("start", "data")
    START_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    start: PutStart
    data: bytes
    def __init__(self, start: _Optional[_Union[PutStart, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutStart(_message.Message):
    __slots__ = ("digest", "size", "offset")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    digest: str
    size: int
    offset: int
    def __init__(self, digest: _Optional[str] = ..., size: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("digest", "offset")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    digest: str
    offset: int
    def __init__(self, digest: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class GetReply(_message.Message):
    __slots__ = ("start", "data")
    START_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    start: GetStart
    data: bytes
    def __init__(self, start: _Optional[_Union[GetStart, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class GetStart(_message.Message):
    __slots__ = ("size",)
    SIZE_FIELD_NUMBER: _ClassVar[int]
    size: int
    def __init__(self, size: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "dims")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DIMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    dims: _containers.RepeatedCompositeFieldContainer[Dim]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., dims: _Optional[_Iterable[_Union[Dim, _Mapping]]] = ...) -> None: ...

class Dim(_message.Message):
    __slots__ = ("size", "symbol")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SYMBOL_FIELD_NUMBER: _ClassVar[int]
    size: int
    symbol: str
    def __init__(self, size: _Optional[int] = ..., symbol: _Optional[str] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "inline", "streamed", "blob")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    STREAMED_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    inline: bytes
    streamed: int
    blob: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., inline: _Optional[bytes] = ..., streamed: _Optional[int] = ..., blob: _Optional[str] = ...) -> None: ...

class ProgramFile(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("files", "main", "runtime", "device", "function", "timeout_s", "instructions")
    FILES_FIELD_NUMBER: _ClassVar[int]
    MAIN_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[ProgramFile]
    main: str
    runtime: str
    device: str
    function: str
    timeout_s: float
    instructions: bool
    def __init__(self, files: _Optional[_Iterable[_Union[ProgramFile, _Mapping]]] = ..., main: _Optional[str] = ..., runtime: _Optional[str] = ..., device: _Optional[str] = ..., function: _Optional[str] = ..., timeout_s: _Optional[float] = ..., instructions: _Optional[bool] = ...) -> None: ...

class LoadReply(_message.Message):
    __slots__ = ("program_id", "device", "function", "inputs", "outputs", "load_ns", "worker_pid")
    PROGRAM_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_NS_FIELD_NUMBER: _ClassVar[int]
    WORKER_PID_FIELD_NUMBER: _ClassVar[int]
    program_id: str
    device: str
    function: str
    inputs: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    outputs: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    load_ns: int
    worker_pid: int
    def __init__(self, program_id: _Optional[str] = ..., device: _Optional[str] = ..., function: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., load_ns: _Optional[int] = ..., worker_pid: _Optional[int] = ...) -> None: ...

class InvokeRequest(_message.Message):
    __slots__ = ("start", "data", "digests")
    START_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    start: InvokeStart
    data: bytes
    digests: Digests
    def __init__(self, start: _Optional[_Union[InvokeStart, _Mapping]] = ..., data: _Optional[bytes] = ..., digests: _Optional[_Union[Digests, _Mapping]] = ...) -> None: ...

class InvokeStart(_message.Message):
    __slots__ = ("program_id", "inputs", "warmup", "iterations", "timeout_s", "state", "profile", "recall", "steps")
    PROGRAM_ID_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    program_id: str
    inputs: _containers.RepeatedCompositeFieldContainer[Tensor]
    warmup: int
    iterations: int
    timeout_s: float
    state: bool
    profile: ProfilePass
    recall: int
    steps: Steps
    def __init__(self, program_id: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., warmup: _Optional[int] = ..., iterations: _Optional[int] = ..., timeout_s: _Optional[float] = ..., state: _Optional[bool] = ..., profile: _Optional[_Union[ProfilePass, _Mapping]] = ..., recall: _Optional[int] = ..., steps: _Optional[_Union[Steps, _Mapping]] = ...) -> None: ...

class Steps(_message.Message):
    __slots__ = ("rules", "feedback", "logits", "steps", "chunk", "stop", "bound", "prompts")
    RULES_FIELD_NUMBER: _ClassVar[int]
    FEEDBACK_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    rules: _containers.RepeatedCompositeFieldContainer[InputRule]
    feedback: _containers.RepeatedCompositeFieldContainer[Feedback]
    logits: int
    steps: int
    chunk: int
    stop: _containers.RepeatedScalarFieldContainer[int]
    bound: int
    prompts: _containers.RepeatedCompositeFieldContainer[PromptFunction]
    def __init__(self, rules: _Optional[_Iterable[_Union[InputRule, _Mapping]]] = ..., feedback: _Optional[_Iterable[_Union[Feedback, _Mapping]]] = ..., logits: _Optional[int] = ..., steps: _Optional[int] = ..., chunk: _Optional[int] = ..., stop: _Optional[_Iterable[int]] = ..., bound: _Optional[int] = ..., prompts: _Optional[_Iterable[_Union[PromptFunction, _Mapping]]] = ...) -> None: ...

class PromptFunction(_message.Message):
    __slots__ = ("name", "inputs", "outputs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    inputs: _containers.RepeatedScalarFieldContainer[int]
    outputs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., inputs: _Optional[_Iterable[int]] = ..., outputs: _Optional[_Iterable[int]] = ...) -> None: ...

class InputRule(_message.Message):
    __slots__ = ("input", "rule")
    INPUT_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    input: int
    rule: str
    def __init__(self, input: _Optional[int] = ..., rule: _Optional[str] = ...) -> None: ...

class Feedback(_message.Message):
    __slots__ = ("input", "output", "shape")
    INPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    input: int
    output: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, input: _Optional[int] = ..., output: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class StepCall(_message.Message):
    __slots__ = ("tokens", "start_ns", "end_ns")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    start_ns: int
    end_ns: int
    def __init__(self, tokens: _Optional[int] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ...) -> None: ...

class ProfilePass(_message.Message):
    __slots__ = ("tool",)
    TOOL_FIELD_NUMBER: _ClassVar[int]
    tool: str
    def __init__(self, tool: _Optional[str] = ...) -> None: ...

class InvokeReply(_message.Message):
    __slots__ = ("done", "data", "digests")
    DONE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    done: InvokeDone
    data: bytes
    digests: Digests
    def __init__(self, done: _Optional[_Union[InvokeDone, _Mapping]] = ..., data: _Optional[bytes] = ..., digests: _Optional[_Union[Digests, _Mapping]] = ...) -> None: ...

class Digests(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digests: _Optional[_Iterable[str]] = ...) -> None: ...

class InvokeDone(_message.Message):
    __slots__ = ("outputs", "start_ns", "end_ns", "warmup_ns", "received_ns", "ready_ns", "peak_memory_bytes", "state", "cpu_ns", "placement", "repetition", "calls", "instructions", "peak_device_memory_bytes")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    WARMUP_NS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_NS_FIELD_NUMBER: _ClassVar[int]
    READY_NS_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CPU_NS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    REPETITION_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    PEAK_DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[Tensor]
    start_ns: _containers.RepeatedScalarFieldContainer[int]
    end_ns: _containers.RepeatedScalarFieldContainer[int]
    warmup_ns: int
    received_ns: int
    ready_ns: int
    peak_memory_bytes: int
    state: State
    cpu_ns: int
    placement: Placement
    repetition: Repetition
    calls: _containers.RepeatedCompositeFieldContainer[StepCall]
    instructions: Instructions
    peak_device_memory_bytes: int
    def __init__(self, outputs: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., start_ns: _Optional[_Iterable[int]] = ..., end_ns: _Optional[_Iterable[int]] = ..., warmup_ns: _Optional[int] = ..., received_ns: _Optional[int] = ..., ready_ns: _Optional[int] = ..., peak_memory_bytes: _Optional[int] = ..., state: _Optional[_Union[State, _Mapping]] = ..., cpu_ns: _Optional[int] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., repetition: _Optional[_Union[Repetition, _Mapping]] = ..., calls: _Optional[_Iterable[_Union[StepCall, _Mapping]]] = ..., instructions: _Optional[_Union[Instructions, _Mapping]] = ..., peak_device_memory_bytes: _Optional[int] = ...) -> None: ...

class Instructions(_message.Message):
    __slots__ = ("counter", "counts", "problem")
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    counter: str
    counts: _containers.RepeatedScalarFieldContainer[int]
    problem: str
    def __init__(self, counter: _Optional[str] = ..., counts: _Optional[_Iterable[int]] = ..., problem: _Optional[str] = ...) -> None: ...

class Repetition(_message.Message):
    __slots__ = ("answers", "sampled", "others", "differing")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[RepeatedAnswer]
    sampled: bool
    others: int
    differing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, answers: _Optional[_Iterable[_Union[RepeatedAnswer, _Mapping]]] = ..., sampled: _Optional[bool] = ..., others: _Optional[int] = ..., differing: _Optional[_Iterable[int]] = ...) -> None: ...

class RepeatedAnswer(_message.Message):
    __slots__ = ("runs", "first", "kept")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    runs: int
    first: int
    kept: bool
    def __init__(self, runs: _Optional[int] = ..., first: _Optional[int] = ..., kept: _Optional[bool] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("device", "nodes", "names", "elsewhere", "reasons")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    device: str
    nodes: int
    names: _containers.RepeatedScalarFieldContainer[str]
    elsewhere: bool
    reasons: _containers.RepeatedCompositeFieldContainer[PlacementReason]
    def __init__(self, device: _Optional[str] = ..., nodes: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., elsewhere: _Optional[bool] = ..., reasons: _Optional[_Iterable[_Union[PlacementReason, _Mapping]]] = ...) -> None: ...

class PlacementReason(_message.Message):
    __slots__ = ("text", "nodes", "names")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    text: str
    nodes: int
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, text: _Optional[str] = ..., nodes: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class State(_message.Message):
    __slots__ = ("clock_ns", "wall_ns", "readings")
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    WALL_NS_FIELD_NUMBER: _ClassVar[int]
    READINGS_FIELD_NUMBER: _ClassVar[int]
    clock_ns: int
    wall_ns: int
    readings: _containers.RepeatedCompositeFieldContainer[Reading]
    def __init__(self, clock_ns: _Optional[int] = ..., wall_ns: _Optional[int] = ..., readings: _Optional[_Iterable[_Union[Reading, _Mapping]]] = ...) -> None: ...

class UnloadRequest(_message.Message):
    __slots__ = ("program_id",)
    PROGRAM_ID_FIELD_NUMBER: _ClassVar[int]
    program_id: str
    def __init__(self, program_id: _Optional[str] = ...) -> None: ...

class UnloadReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
