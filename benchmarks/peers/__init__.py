"""This engine beside other programs: the same prompts, weights and number format, in one run."""
