"""How fast is it? Load generators that see a server as its clients do. Knows nothing of how ours is built."""
