"""Servers for tests. They listen on the loopback interface only and connect to no other machine."""
