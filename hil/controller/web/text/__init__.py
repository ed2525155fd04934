"""Names, numbers, addresses, fields and parameters of pages, and answers in CSV."""
