-- Host or gateway of an event.
alter table hil.events add column host text not null default '';
-- Running gateways. The row of a dead gateway remains until it restarts or another gateway detects the failure.
create table hil.gateways (
    name          text primary key,                     -- machine and address
    seen_at       timestamptz not null
);
