"""Connection to a farm's gateway, and views of the farm."""
