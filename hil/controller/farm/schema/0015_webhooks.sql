-- Webhooks in the settings of the gateways, without URLs and secrets.
create table hil.webhooks (
    name          text primary key,
    events        text[] not null,
    seen_at       timestamptz not null default now()    -- last time a gateway with this webhook was present
);
-- Messages for webhooks. The transaction of an event adds its messages. Gateways deliver them.
create table hil.outbox (
    id            bigint generated always as identity primary key,
    key           text not null default gen_random_uuid()::text,    -- the same in all attempts to deliver the message
    webhook       text not null,
    event         text not null,                        -- job_ended, board_quarantined, host_lost
    at            timestamptz not null default clock_timestamp(),
    board         text not null default '',
    job           text not null default '',
    host          text not null default '',
    reason        text not null default '',
    attempts      int not null default 0,
    next_at       timestamptz not null default clock_timestamp(),   -- a gateway that takes the message moves this time
    sent_at       timestamptz,
    failed_at     timestamptz,                          -- given up
    error         text not null default ''
);
create index on hil.outbox (webhook, next_at) where sent_at is null and failed_at is null;
