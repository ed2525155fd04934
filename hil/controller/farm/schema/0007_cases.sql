-- Case results of running jobs. A finished job's result contains all cases.
create table hil.cases (
    lease         bigint not null references hil.leases on delete cascade,
    number        bigint generated always as identity,
    name          text not null,
    outcome       text not null,
    reason        text not null default '',
    primary key (lease, name)
);
