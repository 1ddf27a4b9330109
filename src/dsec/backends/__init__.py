"""Backends: what a sandbox is made by."""
