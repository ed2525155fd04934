-- User who drained a board, and the reason. This is separate from the reason of the board's state, which may change
-- while the board is drained.
alter table hil.boards add column hold_reason text not null default '';
update hil.boards
    set hold_reason = case when reason like 'drained by %' then reason else 'drained' end,
        reason = case when reason like 'drained by %' then '' else reason end
    where hold <> '';
