"""The REST tree, one module a resource."""
