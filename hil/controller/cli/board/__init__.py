"""`hil board`: boards and their configs."""
