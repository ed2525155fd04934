-- Reservations of boards. A cancelled reservation is deleted.
create table hil.reservations (
    id            bigint generated always as identity primary key,
    user_name     text not null,
    project       text not null default '',
    board         text not null references hil.boards on delete cascade,
    begins_at     timestamptz not null,
    ends_at       timestamptz not null check (ends_at > begins_at),
    made_at       timestamptz not null default clock_timestamp()
);
create index on hil.reservations (board, ends_at);
