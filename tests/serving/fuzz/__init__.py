"""Requests that nobody thought of, made by schemathesis from the server's schema."""
