"""Benchmarks: each module is a script that prints one JSON object and measures its peers in the same run."""
