"""Token slots: who owns which place of a KV pool."""
