-- What a board is warm for, so that a job goes where its program already lies.
alter table hil.jobs add column affinity text not null default '';
update hil.jobs set affinity = coalesce(spec ->> 'affinity', '');
alter table hil.boards add column warm text[] not null default '{}';  -- the last first
update hil.boards as board set warm = found.keys
    from (
        select lease.board, array_agg(distinct job.affinity) as keys
        from hil.leases as lease join hil.jobs as job on job.id = lease.job
        where job.affinity <> '' and lease.ended_at is not null
        group by lease.board
    ) as found
    where found.board = board.name;
