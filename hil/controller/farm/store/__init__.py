"""The farm's desk: its database, and all that is decided and noted there. Only gateways come here."""
