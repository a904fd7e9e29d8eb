"""Servers to test against. All of them listen on the loopback interface only, and none calls home."""
