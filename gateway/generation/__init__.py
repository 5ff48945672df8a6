"""One request from its checks to its last event: what every surface calls."""
