-- Boards removed from the farm. Their rows remain for the history, and so that their fences are not reused.
alter table hil.boards add column forgotten boolean not null default false;
