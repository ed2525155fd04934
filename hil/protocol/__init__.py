"""Protocol between controller, agent and farm: generated messages, wire format, sockets."""
