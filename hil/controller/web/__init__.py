"""Web pages for stored sessions, comparisons, history, tensors, graphs, traces and boards (docs/web.md)."""
