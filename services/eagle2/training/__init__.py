"""Training of draft heads: examples, features, the head's loss, a loop that survives a kill."""
