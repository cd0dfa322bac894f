"""What crosses a verifier-proposer pair, and what carries it."""
