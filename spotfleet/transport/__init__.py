"""Transport of the protocol's messages: HTTP client, TLS certificates and boot files."""
