"""The two sides of benchmarks/against_trl.py; each runs in a process and environment of its own."""
