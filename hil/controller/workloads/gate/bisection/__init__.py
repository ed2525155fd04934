"""Find the commit that made a program wrong or slow: ``hil gate --bisect``."""
