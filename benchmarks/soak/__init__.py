"""A long run of mixed requests, each of which must come out as if it were alone: ``python -m benchmarks.soak``."""
