"""vLLM's cache manager and scheduler as sides of `bench_replay.py`."""
