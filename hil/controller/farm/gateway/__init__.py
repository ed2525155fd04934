"""Gateway: serves users and hosts. It is the only farm process that accesses the database."""
