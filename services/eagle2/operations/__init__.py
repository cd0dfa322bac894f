"""Running eagle2: what stands around the services."""
