"""The farm's database and all decisions stored in it. Used only by gateways."""
