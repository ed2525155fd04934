"""`hil farm` commands that set up and maintain a farm."""
