"""A deterministic simulator of the whole engine: machines, clocks, threads and an object store under one seed.

The product runs as it is. Locks, queues, threads, time and chance come from `flagstone.runtime`, where `Scheduler`
replaces them; requests go to a `Network` in front of a store in memory. See docs/simulation.md.
"""
