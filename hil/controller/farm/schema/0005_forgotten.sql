-- Boards that are none of the farm's any more. Their leases tell what happened, and their fences must not be given again.
alter table hil.boards add column forgotten boolean not null default false;
