"""The record of a case: writing, printing, hints and evidence."""
