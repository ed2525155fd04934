"""Types of stored documents. Writers construct them, readers decode into them, and docs/*.schema.json is generated."""
