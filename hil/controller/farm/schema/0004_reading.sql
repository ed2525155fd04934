-- What a lease's job printed, in bytes: a job without end must not fill the database.
alter table hil.leases add column printed bigint not null default 0;
-- How long jobs waited lately, what happened lately, and what may be deleted are read without reading all.
create index on hil.jobs (started_at) where started_at is not null;
create index on hil.events (at);
create index on hil.events (job, id) where job <> '';
create index on hil.submissions (at);
create index on hil.results (lease);
