-- A fence above the range of normal use was set by mistake or by an attacker, and locks out all users. The value -1
-- marks such a board. The farm grants the board again after an admin forgets it, which restores the fence from its
-- leases.
insert into hil.events (what, board, reason)
    select 'board.fence', name, 'invalid stored fence ' || fence || ': reset it with hil farm forget ' || name
    from hil.boards where fence not between 0 and 4294967296;
update hil.boards
    set fence = -1, forgotten = false, state = 'offline', worker = '', owned_until = null,
        reason = 'invalid stored fence: reset it with hil farm forget ' || name
    where fence not between 0 and 4294967296;
-- The limit is twice the limit for hosts' reports (MOST_FENCE in messages.py), so that higher fences remain available.
alter table hil.boards add constraint boards_fence_is_sane check (fence between -1 and 4294967296);
