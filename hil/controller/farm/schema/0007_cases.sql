-- What the cases of jobs that run came to; a job's result has them all.
create table hil.cases (
    lease         bigint not null references hil.leases on delete cascade,
    number        bigint generated always as identity,
    name          text not null,
    outcome       text not null,
    reason        text not null default '',
    primary key (lease, name)
);
