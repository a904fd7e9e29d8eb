"""Structured Streaming: the change stream as a source, and exactly-once sinks."""
