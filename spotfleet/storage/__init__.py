"""Durable storage: atomic writes, file locks, and stores: their protocol, a folder, object stores, copies of keys."""
