-- Jobs with several boards. `more` has the selector and the name of each board after the first.
alter table hil.submissions add column more jsonb not null default '[]';
alter table hil.jobs add column boards int not null default 1;
-- An allocation round looks for waiting jobs with several boards.
create index jobs_of_several_boards on hil.jobs (id) where state = 'queued' and boards > 1;
-- The job runs with the lease of part 0. The other leases of the job end with this lease.
alter table hil.leases add column part int not null default 0;
drop index hil.leases_one_a_job;
create unique index leases_one_a_part on hil.leases (job, part) where ended_at is null;

-- Groups of the token's user, which give access to restricted boards.
alter table hil.tokens add column groups text[] not null default '{}';
alter table hil.submissions add column groups text[] not null default '{}';

create function hil.lane(
    user_name text, project text, priority text, selector text, board text, checks text, avoid text[],
    more jsonb, groups text[]
) returns text language sql immutable
    return case when more = '[]' and groups = '{}'
        then hil.lane(user_name, project, priority, selector, board, checks, avoid)
        else md5(jsonb_build_array(
            user_name, project, priority, selector, board, coalesce(checks, ''), avoid, more, groups)::text) end;
