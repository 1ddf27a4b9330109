"""The checks, by what they are about. They need no more of an image than a POSIX shell and small tools."""
