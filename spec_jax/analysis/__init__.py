"""Numbers about runs: counters, metrics and their names."""
