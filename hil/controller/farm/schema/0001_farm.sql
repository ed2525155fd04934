-- Tables of the farm. procrastinate's tables are in the schema `public`.
create schema if not exists hil;

create table hil.boards (
    name          text primary key,
    card          jsonb not null,                       -- last description presented by the host
    site          text not null default '',
    host          text not null default '',
    hw_type       text not null default '',
    labels        jsonb not null default '{}',
    state         text not null check (state in ('online', 'suspect', 'quarantined', 'offline')),
    hold          text not null default '' check (hold in ('', 'draining')),  -- set by an admin
    reason        text not null default '',
    fence         bigint not null default 0,            -- highest fence of all grants
    worker        text not null default '',             -- current owner
    owned_until   timestamptz,
    checked_at    timestamptz,                          -- last time the board was healthy
    failures      int not null default 0,               -- failed checks in a row
    check_at      timestamptz,                          -- quarantined: time of the next check
    added_at      timestamptz not null default now()
);

create table hil.submissions (
    id            bigint generated always as identity primary key,
    at            timestamptz not null default now(),
    user_name     text not null,
    project       text not null default '',
    title         text not null,
    selector      text not null default '',
    board         text not null default '',
    priority      text not null check (priority in ('high', 'normal', 'low')),
    timeout_s     double precision not null,
    max_attempts  int not null,
    trace         text not null default '',
    key           text not null unique,                 -- idempotency key: a repeated submission is queued once
    jobs          int not null
);

create table hil.jobs (
    id            bigint generated always as identity primary key,
    submission    bigint not null references hil.submissions on delete cascade,
    number        int not null,
    kind          text not null,
    spec          jsonb not null,
    state         text not null check (state in ('queued', 'running', 'done', 'cancelled')),
    attempts      int not null default 0,               -- number of counted leases
    avoid         text[] not null default '{}',         -- boards on which this job had an infrastructure failure
    queued_at     timestamptz not null default clock_timestamp(),
    started_at    timestamptz,
    finished_at   timestamptz,
    unique (submission, number)
);
create index on hil.jobs (queued_at) where state = 'queued';
create index on hil.jobs (state) where state = 'running';

create table hil.leases (
    id            bigint generated always as identity primary key,
    job           bigint not null references hil.jobs on delete cascade,
    board         text not null references hil.boards,
    worker        text not null,
    fence         bigint not null,
    attempt       int not null,
    queue_id      bigint,                               -- procrastinate job that delivers the lease to the worker
    key           text not null default '',             -- secret of the holder (kind lease)
    granted_at    timestamptz not null default clock_timestamp(),
    started_at    timestamptz,
    expires_at    timestamptz not null,                 -- end of the lease, unless the worker sends a heartbeat
    until         timestamptz not null,                 -- latest end of the lease, regardless of heartbeats
    holder_until  timestamptz,                          -- the same for the holder (kind lease)
    direct        text not null default '',
    ended_at      timestamptz,
    reason        text not null default '',
    result        jsonb,                                -- report of the worker, even if it did not count
    unique (board, fence)
);
-- At most one active lease per board and per job.
create unique index leases_one_a_board on hil.leases (board) where ended_at is null;
create unique index leases_one_a_job on hil.leases (job) where ended_at is null;
create index on hil.leases (job);

create table hil.results (
    job           bigint primary key references hil.jobs on delete cascade,
    lease         bigint references hil.leases on delete cascade,
    at            timestamptz not null default clock_timestamp(),
    exit_code     int not null,
    outcome       text not null default '',
    result        jsonb not null
);

create table hil.logs (
    id            bigint generated always as identity primary key,
    job           bigint not null references hil.jobs on delete cascade,
    lease         bigint not null,
    at            timestamptz not null default clock_timestamp(),
    text          text not null
);
create index on hil.logs (job, id);

create table hil.events (
    id            bigint generated always as identity primary key,
    at            timestamptz not null default clock_timestamp(),
    what          text not null,                        -- board.suspect, job.granted, lease.expired, ...
    board         text not null default '',
    job           text not null default '',
    lease         bigint,
    reason        text not null default ''
);
create index on hil.events (board, id);

create table hil.audit (
    id            bigint generated always as identity primary key,
    at            timestamptz not null default clock_timestamp(),
    user_name     text not null,
    role          text not null,
    peer          text not null default '',
    action        text not null,
    object        text not null default '',
    allowed       boolean not null,
    detail        jsonb not null default '{}'
);

create table hil.tokens (
    id            bigint generated always as identity primary key,
    digest        text not null unique,                 -- SHA-256 of the token; the token is not stored
    user_name     text not null,
    project       text not null default '',
    role          text not null check (role in ('viewer', 'submitter', 'host', 'admin')),
    note          text not null default '',
    made_at       timestamptz not null default now(),
    expires_at    timestamptz,
    revoked_at    timestamptz
);

create table hil.artifacts (
    digest        text primary key,
    size          bigint not null,
    used_at       timestamptz not null default now()
);
