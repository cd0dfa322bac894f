"""Stand-ins that keep the contracts of the real things."""
