"""Benchmarks: everything is measured interleaved in one run, and told as ratios."""
