"""Home page: the last nights, new failures and slower cases, sessions."""
