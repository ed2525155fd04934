-- Permissions of a token in addition to those of its role.
alter table hil.tokens add column rights text[] not null default '{}';
