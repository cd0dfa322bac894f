"""Who is where: which verifier holds the KV cache of which conversation."""
