"""What keeps a database small, fast and safe."""
