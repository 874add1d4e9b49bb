"""Command group `image`: ready images of an account."""
