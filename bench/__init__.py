"""Benchmarks: all contenders are measured interleaved in one run, and compared as ratios.

`make bench` runs all comparisons and writes `results/`: a table and its figures as JSON for each, and from those a page
with one comparison table and charts (`results/README.md`). `python -m bench --quick` checks in a minute or two that all of it
works. A comparison is a module with `run() -> str`, named in `__main__.COMPARISONS`; it sizes itself with
`harness.sized` and ends with `harness.write_markdown`. Charts and page are made from the JSON alone, so they can be made
again without measuring: `python -m bench summary`. `rates` measures the README's table for Flagstone alone, for the demo.
"""
