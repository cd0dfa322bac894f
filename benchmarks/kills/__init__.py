"""Processes of a service are killed at random; what its clients see of that is compared with a quiet run."""
