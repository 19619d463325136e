"""Gates G1 to G6 and latency: every check that a file must pass before it is published."""
