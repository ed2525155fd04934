"""Write and print the records of cases, with hints and evidence."""
