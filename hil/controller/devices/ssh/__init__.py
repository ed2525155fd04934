"""SSH: shells on boards (``connect.open_shell``), verified host keys, and tunnels to a board's sockets (``tunnel``)."""
