"""The walls of a sandbox as data: system calls, capabilities, hidden and read-only paths."""
