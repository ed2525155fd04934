"""Messages about the causes of new failures: `hil notify`."""
