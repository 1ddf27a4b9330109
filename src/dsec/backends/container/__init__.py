"""The container backend: Linux namespaces, an overlay of shared layers, and aether beside each sandbox."""
