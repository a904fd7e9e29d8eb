"""Other pictures of the same tables: checkpoints, and what is made of them."""
