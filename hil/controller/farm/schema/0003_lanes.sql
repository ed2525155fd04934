-- Jobs with equal scheduling properties form a lane, so that a grant reads few rows of a long queue.
create function hil.lane(
    user_name text, project text, priority text, selector text, board text, checks text, avoid text[]
) returns text language sql immutable
    return md5(jsonb_build_array(user_name, project, priority, selector, board, coalesce(checks, ''), avoid)::text);

alter table hil.jobs add column lane text not null default '';
alter table hil.jobs add column checks text;                         -- board of a health job
update hil.jobs as job set checks = submission.board
    from hil.submissions as submission
    where submission.id = job.submission and job.kind = 'health' and not exists (
        select from hil.jobs as later join hil.submissions as its on its.id = later.submission
        where later.kind = 'health' and its.board = submission.board and later.id > job.id);
update hil.jobs as job set lane = hil.lane(
        submission.user_name, submission.project, submission.priority, submission.selector, submission.board,
        job.checks, job.avoid)
    from hil.submissions as submission where submission.id = job.submission;
-- The index starts with the lane and the time, so that the planner does not scan all finished jobs in primary key
-- order.
create index jobs_lanes on hil.jobs (lane, queued_at, id) where state = 'queued';
drop index hil.jobs_queued_at_idx;
-- At most one open check per board.
create unique index jobs_one_check_a_board on hil.jobs (checks) where state in ('queued', 'running');

-- Digest for caching: each version of a board's labels is read only once.
alter table hil.boards add column labels_digest text generated always as (md5(labels::text)) stored;

-- Past board use of each user in seconds, with exponential decay; computed at time `at`.
create table hil.shares (
    user_name     text not null,
    project       text not null default '',
    board_s       double precision not null default 0,
    at            timestamptz not null default clock_timestamp(),
    primary key (user_name, project)
);
create function hil.faded(board_s double precision, at timestamptz, half_life_s double precision)
    returns double precision language sql stable
    return board_s * power(0.5, least(greatest(extract(epoch from clock_timestamp() - at), 0) / half_life_s, 100));
