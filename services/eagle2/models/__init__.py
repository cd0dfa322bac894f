"""Networks and checkpoints: the target, the draft head, and where their weights come from."""
