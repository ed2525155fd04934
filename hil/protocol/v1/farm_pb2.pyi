from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubmitRequest(_message.Message):
    __slots__ = ("order", "trace")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    order: str
    trace: str
    def __init__(self, order: _Optional[str] = ..., trace: _Optional[str] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("submission", "jobs")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    submission: int
    jobs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, submission: _Optional[int] = ..., jobs: _Optional[_Iterable[str]] = ...) -> None: ...

class AskRequest(_message.Message):
    __slots__ = ("what", "arguments")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    what: str
    arguments: str
    def __init__(self, what: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class DoRequest(_message.Message):
    __slots__ = ("action", "arguments")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    action: str
    arguments: str
    def __init__(self, action: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("jobs", "logs", "after")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedScalarFieldContainer[str]
    logs: bool
    after: int
    def __init__(self, jobs: _Optional[_Iterable[str]] = ..., logs: _Optional[bool] = ..., after: _Optional[int] = ...) -> None: ...

class FollowReply(_message.Message):
    __slots__ = ("job", "log")
    JOB_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    job: str
    log: LogText
    def __init__(self, job: _Optional[str] = ..., log: _Optional[_Union[LogText, _Mapping]] = ...) -> None: ...

class LogText(_message.Message):
    __slots__ = ("number", "job", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: int
    job: str
    text: str
    def __init__(self, number: _Optional[int] = ..., job: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("open", "resume", "beat")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    open: str
    resume: ResumeLease
    beat: Beat
    def __init__(self, open: _Optional[str] = ..., resume: _Optional[_Union[ResumeLease, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class ResumeLease(_message.Message):
    __slots__ = ("lease", "key")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    lease: int
    key: str
    def __init__(self, lease: _Optional[int] = ..., key: _Optional[str] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("waiting", "granted", "over", "beat")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    waiting: str
    granted: LeaseGranted
    over: str
    beat: Beat
    def __init__(self, waiting: _Optional[str] = ..., granted: _Optional[_Union[LeaseGranted, _Mapping]] = ..., over: _Optional[str] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class LeaseGranted(_message.Message):
    __slots__ = ("grant", "card", "key")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    grant: str
    card: str
    key: str
    def __init__(self, grant: _Optional[str] = ..., card: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class FromBoard(_message.Message):
    __slots__ = ("hello", "beat", "started", "printed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PRINTED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    beat: BoardBeat
    started: Started
    printed: Printed
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., beat: _Optional[_Union[BoardBeat, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., printed: _Optional[_Union[Printed, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("card", "worker", "leases")
    CARD_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    card: str
    worker: str
    leases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, card: _Optional[str] = ..., worker: _Optional[str] = ..., leases: _Optional[_Iterable[int]] = ...) -> None: ...

class BoardBeat(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, leases: _Optional[_Iterable[int]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("lease", "direct")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    lease: int
    direct: str
    def __init__(self, lease: _Optional[int] = ..., direct: _Optional[str] = ...) -> None: ...

class Printed(_message.Message):
    __slots__ = ("lease", "text")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    lease: int
    text: str
    def __init__(self, lease: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class ToBoard(_message.Message):
    __slots__ = ("standing", "grant", "ended", "dial", "beat")
    STANDING_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    DIAL_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    standing: Standing
    grant: str
    ended: Ended
    dial: DialIn
    beat: Beat
    def __init__(self, standing: _Optional[_Union[Standing, _Mapping]] = ..., grant: _Optional[str] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., dial: _Optional[_Union[DialIn, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("owner", "beat_s")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    BEAT_S_FIELD_NUMBER: _ClassVar[int]
    owner: bool
    beat_s: float
    def __init__(self, owner: _Optional[bool] = ..., beat_s: _Optional[float] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("lease", "reason")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease: int
    reason: str
    def __init__(self, lease: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class DialIn(_message.Message):
    __slots__ = ("id", "lease", "gateway")
    ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    id: str
    lease: int
    gateway: str
    def __init__(self, id: _Optional[str] = ..., lease: _Optional[int] = ..., gateway: _Optional[str] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("lease", "worker", "result", "fence")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    lease: int
    worker: str
    result: str
    fence: int
    def __init__(self, lease: _Optional[int] = ..., worker: _Optional[str] = ..., result: _Optional[str] = ..., fence: _Optional[int] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("recorded", "reason")
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    recorded: bool
    reason: str
    def __init__(self, recorded: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class LacksRequest(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digests: _Optional[_Iterable[str]] = ...) -> None: ...

class LacksReply(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digests: _Optional[_Iterable[str]] = ...) -> None: ...

class FileStart(_message.Message):
    __slots__ = ("digest", "size")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    size: int
    def __init__(self, digest: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class FilePiece(_message.Message):
    __slots__ = ("start", "data")
    START_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    start: FileStart
    data: bytes
    def __init__(self, start: _Optional[_Union[FileStart, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ("stored",)
    STORED_FIELD_NUMBER: _ClassVar[int]
    stored: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stored: _Optional[_Iterable[str]] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...
