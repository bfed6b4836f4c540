"""The host benchmark: cases, layouts and the two sides they run on. `scripts/bench_host.py` is its command
line."""
