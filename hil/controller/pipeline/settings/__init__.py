"""Define the options of a run, and read and write them: project file, flag files, commands that repeat a run."""
