-- A fence that normal use cannot reach was set by mistake or by an attacker, and locks out all users. -1 marks such a
-- board: it is not granted until it is forgotten, which restores the fence from its leases.
insert into hil.events (what, board, reason)
    select 'board.fence', name, 'invalid stored fence ' || fence || ': reset it with hil farm forget ' || name
    from hil.boards where fence not between 0 and 4294967296;
update hil.boards
    set fence = -1, forgotten = false, state = 'offline', worker = '', owned_until = null,
        reason = 'invalid stored fence: reset it with hil farm forget ' || name
    where fence not between 0 and 4294967296;
-- Twice the limit for reports of hosts (MOST_FENCE in messages.py), so that higher fences remain available.
alter table hil.boards add constraint boards_fence_is_sane check (fence between -1 and 4294967296);
