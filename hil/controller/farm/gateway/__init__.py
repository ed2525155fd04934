"""Gateway: serves users and hosts. The gateway is the only farm process that accesses the database."""
