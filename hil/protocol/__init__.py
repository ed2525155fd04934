"""The protocol between controller, agent and farm: generated messages, the wire, sockets."""
