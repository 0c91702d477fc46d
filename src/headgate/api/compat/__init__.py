"""The same commands under the names that others have given them. A dialect translates, and decides nothing."""
