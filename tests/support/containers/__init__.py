"""Containers in tests: a root file system of Debian, and clients of engines that check their command lines."""
