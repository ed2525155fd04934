"""Access to `hil web`: tokens, cookies, peers, connections and fair sharing of requests."""
