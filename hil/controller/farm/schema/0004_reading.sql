-- Stored output of a lease's job in bytes. The output is limited, so that an endless job does not fill the database.
alter table hil.leases add column printed bigint not null default 0;
-- Indexes for recent queue times, recent events, and rows to delete.
create index on hil.jobs (started_at) where started_at is not null;
create index on hil.events (at);
create index on hil.events (job, id) where job <> '';
create index on hil.submissions (at);
create index on hil.results (lease);
