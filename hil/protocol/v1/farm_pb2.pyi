from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Json(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    def __init__(self, text: _Optional[bytes] = ...) -> None: ...

class JobSpec(_message.Message):
    __slots__ = ("kind", "options", "files", "affinity", "title")
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    AFFINITY_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    options: Json
    files: _containers.ScalarMap[str, str]
    affinity: str
    title: str
    def __init__(self, kind: _Optional[str] = ..., options: _Optional[_Union[Json, _Mapping]] = ..., files: _Optional[_Mapping[str, str]] = ..., affinity: _Optional[str] = ..., title: _Optional[str] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("title", "specs", "selector", "board", "priority", "timeout_s", "max_attempts", "project", "key", "more")
    TITLE_FIELD_NUMBER: _ClassVar[int]
    SPECS_FIELD_NUMBER: _ClassVar[int]
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    BOARD_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    title: str
    specs: _containers.RepeatedCompositeFieldContainer[JobSpec]
    selector: str
    board: str
    priority: str
    timeout_s: float
    max_attempts: int
    project: str
    key: str
    more: _containers.RepeatedCompositeFieldContainer[BoardRequest]
    def __init__(self, title: _Optional[str] = ..., specs: _Optional[_Iterable[_Union[JobSpec, _Mapping]]] = ..., selector: _Optional[str] = ..., board: _Optional[str] = ..., priority: _Optional[str] = ..., timeout_s: _Optional[float] = ..., max_attempts: _Optional[int] = ..., project: _Optional[str] = ..., key: _Optional[str] = ..., more: _Optional[_Iterable[_Union[BoardRequest, _Mapping]]] = ...) -> None: ...

class BoardRequest(_message.Message):
    __slots__ = ("selector", "board")
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    BOARD_FIELD_NUMBER: _ClassVar[int]
    selector: str
    board: str
    def __init__(self, selector: _Optional[str] = ..., board: _Optional[str] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("submission", "trace")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    submission: Submission
    trace: str
    def __init__(self, submission: _Optional[_Union[Submission, _Mapping]] = ..., trace: _Optional[str] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("submission", "jobs")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    submission: int
    jobs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, submission: _Optional[int] = ..., jobs: _Optional[_Iterable[str]] = ...) -> None: ...

class AskRequest(_message.Message):
    __slots__ = ("jobs", "job", "result", "logs", "boards", "events", "stats", "audit", "tokens", "me", "queue", "cases", "reservations", "webhooks", "access")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    BOARDS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ME_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    CASES_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    WEBHOOKS_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    jobs: JobsQuestion
    job: NameQuestion
    result: ResultQuestion
    logs: LogsQuestion
    boards: Empty
    events: EventsQuestion
    stats: StatsQuestion
    audit: AuditQuestion
    tokens: Empty
    me: Empty
    queue: QueueQuestion
    cases: CasesQuestion
    reservations: Empty
    webhooks: Empty
    access: AccessQuestion
    def __init__(self, jobs: _Optional[_Union[JobsQuestion, _Mapping]] = ..., job: _Optional[_Union[NameQuestion, _Mapping]] = ..., result: _Optional[_Union[ResultQuestion, _Mapping]] = ..., logs: _Optional[_Union[LogsQuestion, _Mapping]] = ..., boards: _Optional[_Union[Empty, _Mapping]] = ..., events: _Optional[_Union[EventsQuestion, _Mapping]] = ..., stats: _Optional[_Union[StatsQuestion, _Mapping]] = ..., audit: _Optional[_Union[AuditQuestion, _Mapping]] = ..., tokens: _Optional[_Union[Empty, _Mapping]] = ..., me: _Optional[_Union[Empty, _Mapping]] = ..., queue: _Optional[_Union[QueueQuestion, _Mapping]] = ..., cases: _Optional[_Union[CasesQuestion, _Mapping]] = ..., reservations: _Optional[_Union[Empty, _Mapping]] = ..., webhooks: _Optional[_Union[Empty, _Mapping]] = ..., access: _Optional[_Union[AccessQuestion, _Mapping]] = ...) -> None: ...

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NameQuestion(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class JobsQuestion(_message.Message):
    __slots__ = ("state", "user", "submission", "limit", "health", "before", "failed", "since")
    STATE_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    state: _containers.RepeatedScalarFieldContainer[str]
    user: str
    submission: int
    limit: int
    health: bool
    before: str
    failed: bool
    since: float
    def __init__(self, state: _Optional[_Iterable[str]] = ..., user: _Optional[str] = ..., submission: _Optional[int] = ..., limit: _Optional[int] = ..., health: _Optional[bool] = ..., before: _Optional[str] = ..., failed: _Optional[bool] = ..., since: _Optional[float] = ...) -> None: ...

class StatsQuestion(_message.Message):
    __slots__ = ("state", "user", "failed", "since")
    STATE_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    state: _containers.RepeatedScalarFieldContainer[str]
    user: str
    failed: bool
    since: float
    def __init__(self, state: _Optional[_Iterable[str]] = ..., user: _Optional[str] = ..., failed: _Optional[bool] = ..., since: _Optional[float] = ...) -> None: ...

class ResultQuestion(_message.Message):
    __slots__ = ("name", "specs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPECS_FIELD_NUMBER: _ClassVar[int]
    name: str
    specs: bool
    def __init__(self, name: _Optional[str] = ..., specs: _Optional[bool] = ...) -> None: ...

class LogsQuestion(_message.Message):
    __slots__ = ("name", "after")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    name: str
    after: int
    def __init__(self, name: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class AccessQuestion(_message.Message):
    __slots__ = ("user",)
    USER_FIELD_NUMBER: _ClassVar[int]
    user: str
    def __init__(self, user: _Optional[str] = ...) -> None: ...

class EventsQuestion(_message.Message):
    __slots__ = ("board", "job", "limit")
    BOARD_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    board: str
    job: str
    limit: int
    def __init__(self, board: _Optional[str] = ..., job: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class AuditQuestion(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class QueueQuestion(_message.Message):
    __slots__ = ("limit", "jobs")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    limit: int
    jobs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, limit: _Optional[int] = ..., jobs: _Optional[_Iterable[str]] = ...) -> None: ...

class CasesQuestion(_message.Message):
    __slots__ = ("name", "limit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    limit: int
    def __init__(self, name: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class DoRequest(_message.Message):
    __slots__ = ("cancel", "priority", "drain", "resume", "forget", "token", "revoke", "gc", "power", "reserve", "unreserve", "webhook", "provision")
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    GC_FIELD_NUMBER: _ClassVar[int]
    POWER_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    UNRESERVE_FIELD_NUMBER: _ClassVar[int]
    WEBHOOK_FIELD_NUMBER: _ClassVar[int]
    PROVISION_FIELD_NUMBER: _ClassVar[int]
    cancel: NameQuestion
    priority: PriorityAction
    drain: DrainAction
    resume: NameQuestion
    forget: NameQuestion
    token: TokenAction
    revoke: RevokeAction
    gc: GcAction
    power: PowerAction
    reserve: ReserveAction
    unreserve: ReservationAction
    webhook: WebhookAction
    provision: ProvisionAction
    def __init__(self, cancel: _Optional[_Union[NameQuestion, _Mapping]] = ..., priority: _Optional[_Union[PriorityAction, _Mapping]] = ..., drain: _Optional[_Union[DrainAction, _Mapping]] = ..., resume: _Optional[_Union[NameQuestion, _Mapping]] = ..., forget: _Optional[_Union[NameQuestion, _Mapping]] = ..., token: _Optional[_Union[TokenAction, _Mapping]] = ..., revoke: _Optional[_Union[RevokeAction, _Mapping]] = ..., gc: _Optional[_Union[GcAction, _Mapping]] = ..., power: _Optional[_Union[PowerAction, _Mapping]] = ..., reserve: _Optional[_Union[ReserveAction, _Mapping]] = ..., unreserve: _Optional[_Union[ReservationAction, _Mapping]] = ..., webhook: _Optional[_Union[WebhookAction, _Mapping]] = ..., provision: _Optional[_Union[ProvisionAction, _Mapping]] = ...) -> None: ...

class PriorityAction(_message.Message):
    __slots__ = ("name", "priority")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    name: str
    priority: str
    def __init__(self, name: _Optional[str] = ..., priority: _Optional[str] = ...) -> None: ...

class DrainAction(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class TokenAction(_message.Message):
    __slots__ = ("user", "role", "project", "note", "expires_s", "rights", "groups")
    USER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    user: str
    role: str
    project: str
    note: str
    expires_s: float
    rights: _containers.RepeatedScalarFieldContainer[str]
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, user: _Optional[str] = ..., role: _Optional[str] = ..., project: _Optional[str] = ..., note: _Optional[str] = ..., expires_s: _Optional[float] = ..., rights: _Optional[_Iterable[str]] = ..., groups: _Optional[_Iterable[str]] = ...) -> None: ...

class RevokeAction(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class GcAction(_message.Message):
    __slots__ = ("days", "dry_run")
    DAYS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    days: float
    dry_run: bool
    def __init__(self, days: _Optional[float] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class PowerAction(_message.Message):
    __slots__ = ("name", "switch", "detach")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    name: str
    switch: str
    detach: bool
    def __init__(self, name: _Optional[str] = ..., switch: _Optional[str] = ..., detach: _Optional[bool] = ...) -> None: ...

class ProvisionAction(_message.Message):
    __slots__ = ("name", "file", "image")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    file: str
    image: str
    def __init__(self, name: _Optional[str] = ..., file: _Optional[str] = ..., image: _Optional[str] = ...) -> None: ...

class ReserveAction(_message.Message):
    __slots__ = ("selector", "begin", "seconds")
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    selector: str
    begin: float
    seconds: float
    def __init__(self, selector: _Optional[str] = ..., begin: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class ReservationAction(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class WebhookAction(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("answer",)
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    answer: Json
    def __init__(self, answer: _Optional[_Union[Json, _Mapping]] = ...) -> None: ...

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
    job: JobStatus
    log: LogText
    def __init__(self, job: _Optional[_Union[JobStatus, _Mapping]] = ..., log: _Optional[_Union[LogText, _Mapping]] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("name", "submission", "state", "priority", "attempts", "board", "exit_code", "outcome", "reason", "unrunnable", "blocked", "boards")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    BOARD_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UNRUNNABLE_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    BOARDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    submission: int
    state: str
    priority: str
    attempts: int
    board: str
    exit_code: int
    outcome: str
    reason: str
    unrunnable: str
    blocked: str
    boards: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., submission: _Optional[int] = ..., state: _Optional[str] = ..., priority: _Optional[str] = ..., attempts: _Optional[int] = ..., board: _Optional[str] = ..., exit_code: _Optional[int] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., unrunnable: _Optional[str] = ..., blocked: _Optional[str] = ..., boards: _Optional[_Iterable[str]] = ...) -> None: ...

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
    open: Submission
    resume: ResumeLease
    beat: Beat
    def __init__(self, open: _Optional[_Union[Submission, _Mapping]] = ..., resume: _Optional[_Union[ResumeLease, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

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
    waiting: JobStatus
    granted: LeaseGranted
    over: str
    beat: Beat
    def __init__(self, waiting: _Optional[_Union[JobStatus, _Mapping]] = ..., granted: _Optional[_Union[LeaseGranted, _Mapping]] = ..., over: _Optional[str] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class LeaseGranted(_message.Message):
    __slots__ = ("grant", "card", "key")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    grant: Grant
    card: BoardCard
    key: str
    def __init__(self, grant: _Optional[_Union[Grant, _Mapping]] = ..., card: _Optional[_Union[BoardCard, _Mapping]] = ..., key: _Optional[str] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("lease", "job", "job_id", "board", "fence", "ttl_s", "timeout_s", "attempt", "spec", "user", "trace", "more")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    BOARD_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    lease: int
    job: str
    job_id: int
    board: str
    fence: int
    ttl_s: float
    timeout_s: float
    attempt: int
    spec: JobSpec
    user: str
    trace: str
    more: _containers.RepeatedCompositeFieldContainer[LeaseGranted]
    def __init__(self, lease: _Optional[int] = ..., job: _Optional[str] = ..., job_id: _Optional[int] = ..., board: _Optional[str] = ..., fence: _Optional[int] = ..., ttl_s: _Optional[float] = ..., timeout_s: _Optional[float] = ..., attempt: _Optional[int] = ..., spec: _Optional[_Union[JobSpec, _Mapping]] = ..., user: _Optional[str] = ..., trace: _Optional[str] = ..., more: _Optional[_Iterable[_Union[LeaseGranted, _Mapping]]] = ...) -> None: ...

class BoardCard(_message.Message):
    __slots__ = ("name", "site", "host", "labels", "config", "hw_type", "fence", "powered", "direct", "machine", "power", "access", "provisions", "image", "meter", "console")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Label
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Label, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    HW_TYPE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    POWERED_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    POWER_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    PROVISIONS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    METER_FIELD_NUMBER: _ClassVar[int]
    CONSOLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    site: str
    host: str
    labels: _containers.MessageMap[str, Label]
    config: str
    hw_type: str
    fence: int
    powered: bool
    direct: str
    machine: str
    power: _containers.RepeatedScalarFieldContainer[str]
    access: BoardAccess
    provisions: bool
    image: WrittenImage
    meter: MeterCard
    console: str
    def __init__(self, name: _Optional[str] = ..., site: _Optional[str] = ..., host: _Optional[str] = ..., labels: _Optional[_Mapping[str, Label]] = ..., config: _Optional[str] = ..., hw_type: _Optional[str] = ..., fence: _Optional[int] = ..., powered: _Optional[bool] = ..., direct: _Optional[str] = ..., machine: _Optional[str] = ..., power: _Optional[_Iterable[str]] = ..., access: _Optional[_Union[BoardAccess, _Mapping]] = ..., provisions: _Optional[bool] = ..., image: _Optional[_Union[WrittenImage, _Mapping]] = ..., meter: _Optional[_Union[MeterCard, _Mapping]] = ..., console: _Optional[str] = ...) -> None: ...

class MeterCard(_message.Message):
    __slots__ = ("kind", "on_board", "path", "channel", "rate_hz", "idle_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ON_BOARD_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    RATE_HZ_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    on_board: bool
    path: str
    channel: int
    rate_hz: float
    idle_s: float
    def __init__(self, kind: _Optional[str] = ..., on_board: _Optional[bool] = ..., path: _Optional[str] = ..., channel: _Optional[int] = ..., rate_hz: _Optional[float] = ..., idle_s: _Optional[float] = ...) -> None: ...

class WrittenImage(_message.Message):
    __slots__ = ("file", "sha256", "time_s")
    FILE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    file: str
    sha256: str
    time_s: float
    def __init__(self, file: _Optional[str] = ..., sha256: _Optional[str] = ..., time_s: _Optional[float] = ...) -> None: ...

class BoardAccess(_message.Message):
    __slots__ = ("users", "groups")
    USERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedScalarFieldContainer[str]
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, users: _Optional[_Iterable[str]] = ..., groups: _Optional[_Iterable[str]] = ...) -> None: ...

class Label(_message.Message):
    __slots__ = ("text", "whole", "number", "truth", "texts")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TRUTH_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    text: str
    whole: int
    number: float
    truth: bool
    texts: Texts
    def __init__(self, text: _Optional[str] = ..., whole: _Optional[int] = ..., number: _Optional[float] = ..., truth: _Optional[bool] = ..., texts: _Optional[_Union[Texts, _Mapping]] = ...) -> None: ...

class Texts(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class FromBoard(_message.Message):
    __slots__ = ("hello", "beat", "started", "printed", "switched")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PRINTED_FIELD_NUMBER: _ClassVar[int]
    SWITCHED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    beat: BoardBeat
    started: Started
    printed: Printed
    switched: Switched
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., beat: _Optional[_Union[BoardBeat, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., printed: _Optional[_Union[Printed, _Mapping]] = ..., switched: _Optional[_Union[Switched, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("card", "worker", "leases")
    CARD_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    card: BoardCard
    worker: str
    leases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, card: _Optional[_Union[BoardCard, _Mapping]] = ..., worker: _Optional[str] = ..., leases: _Optional[_Iterable[int]] = ...) -> None: ...

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
    __slots__ = ("lease", "text", "cases")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CASES_FIELD_NUMBER: _ClassVar[int]
    lease: int
    text: str
    cases: _containers.RepeatedCompositeFieldContainer[CaseEnded]
    def __init__(self, lease: _Optional[int] = ..., text: _Optional[str] = ..., cases: _Optional[_Iterable[_Union[CaseEnded, _Mapping]]] = ...) -> None: ...

class CaseEnded(_message.Message):
    __slots__ = ("name", "outcome", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    outcome: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Switched(_message.Message):
    __slots__ = ("id", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    error: str
    def __init__(self, id: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class ToBoard(_message.Message):
    __slots__ = ("standing", "grant", "ended", "dial", "beat", "power")
    STANDING_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    DIAL_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    POWER_FIELD_NUMBER: _ClassVar[int]
    standing: Standing
    grant: Grant
    ended: Ended
    dial: DialIn
    beat: Beat
    power: SwitchPower
    def __init__(self, standing: _Optional[_Union[Standing, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., dial: _Optional[_Union[DialIn, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., power: _Optional[_Union[SwitchPower, _Mapping]] = ...) -> None: ...

class SwitchPower(_message.Message):
    __slots__ = ("id", "action", "lease", "force", "file", "image")
    ID_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    id: str
    action: str
    lease: int
    force: bool
    file: str
    image: str
    def __init__(self, id: _Optional[str] = ..., action: _Optional[str] = ..., lease: _Optional[int] = ..., force: _Optional[bool] = ..., file: _Optional[str] = ..., image: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("id", "lease", "gateway", "console")
    ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    CONSOLE_FIELD_NUMBER: _ClassVar[int]
    id: str
    lease: int
    gateway: str
    console: bool
    def __init__(self, id: _Optional[str] = ..., lease: _Optional[int] = ..., gateway: _Optional[str] = ..., console: _Optional[bool] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("lease", "worker", "result", "fence")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    lease: int
    worker: str
    result: JobResult
    fence: int
    def __init__(self, lease: _Optional[int] = ..., worker: _Optional[str] = ..., result: _Optional[_Union[JobResult, _Mapping]] = ..., fence: _Optional[int] = ...) -> None: ...

class JobResult(_message.Message):
    __slots__ = ("exit_code", "outcome", "reason", "infrastructure", "record", "files", "timings", "board_begin_ns", "board_end_ns")
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class TimingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    INFRASTRUCTURE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    BOARD_BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    BOARD_END_NS_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    outcome: str
    reason: str
    infrastructure: bool
    record: Json
    files: _containers.ScalarMap[str, str]
    timings: _containers.ScalarMap[str, float]
    board_begin_ns: int
    board_end_ns: int
    def __init__(self, exit_code: _Optional[int] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., infrastructure: _Optional[bool] = ..., record: _Optional[_Union[Json, _Mapping]] = ..., files: _Optional[_Mapping[str, str]] = ..., timings: _Optional[_Mapping[str, float]] = ..., board_begin_ns: _Optional[int] = ..., board_end_ns: _Optional[int] = ...) -> None: ...

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
