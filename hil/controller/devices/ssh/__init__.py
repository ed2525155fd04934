"""SSH: shells on boards (``connect.open_shell``), verified host keys, tunnels to a board's sockets (``tunnel``)."""
