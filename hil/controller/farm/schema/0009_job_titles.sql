-- Display title of a job: the model's name. Empty: the submission's title.
alter table hil.jobs add column title text not null default '';
