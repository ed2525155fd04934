"""Options of a run: declaration, project file, flag files and commands that repeat a run."""
