"""The drafter of a pair, as plain Python and as a Serve deployment."""
