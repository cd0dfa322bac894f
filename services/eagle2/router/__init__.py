"""The HTTP ingress: requests come in, streams go out. Never imports torch."""
