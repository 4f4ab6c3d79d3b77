"""Numbers about runs: metrics and their names, theory, replay without the target."""
