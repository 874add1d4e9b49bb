"""Durable storage: atomic writes, file locks, a mounted folder, object stores (S3, GCS, Azure)."""
