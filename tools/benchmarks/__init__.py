"""What tools/bench.py measures with: one module a system, and what they share."""
