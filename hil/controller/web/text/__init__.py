"""Names, numbers, addresses and fields as text for pages."""
