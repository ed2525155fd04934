-- True if the farm's history has the job's result, or cannot store it.
alter table hil.jobs add column in_history boolean not null default false;
create index jobs_not_in_history on hil.jobs (id)
    where state = 'done' and not in_history and kind in ('run', 'bundle', 'suite');
