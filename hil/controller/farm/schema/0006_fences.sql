-- A fence that no board comes to by being used was set by mistake or in an attack, and locks everybody out. -1 marks a
-- board whose fence was one: nobody has it until it is forgotten, which takes the fence from its leases.
insert into hil.events (what, board, reason)
    select 'board.fence', name, 'its stored fence, ' || fence || ', makes no sense: hil farm forget ' || name || ' mends it'
    from hil.boards where fence not between 0 and 4294967296;
update hil.boards
    set fence = -1, forgotten = false, state = 'offline', worker = '', owned_until = null,
        reason = 'its stored fence makes no sense: hil farm forget ' || name || ' mends it'
    where fence not between 0 and 4294967296;
-- Twice what a host may report (MOST_FENCE in words.py), so that there is always room above that.
alter table hil.boards add constraint boards_fence_is_sane check (fence between -1 and 4294967296);
