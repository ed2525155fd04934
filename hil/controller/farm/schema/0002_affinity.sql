-- Affinity keys of the data cached on a board. A job prefers a board with its program.
alter table hil.jobs add column affinity text not null default '';
update hil.jobs set affinity = coalesce(spec ->> 'affinity', '');
alter table hil.boards add column warm text[] not null default '{}';  -- most recent first
update hil.boards as board set warm = found.keys
    from (
        select lease.board, array_agg(distinct job.affinity) as keys
        from hil.leases as lease join hil.jobs as job on job.id = lease.job
        where job.affinity <> '' and lease.ended_at is not null
        group by lease.board
    ) as found
    where found.board = board.name;
