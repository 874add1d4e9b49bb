"""Published strategies to compare with."""
