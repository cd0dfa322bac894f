"""Measuring eagle2: how fast it decodes, and how much of what it drafts is accepted."""
