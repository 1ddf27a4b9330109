"""File trees as values: what a layer holds, how layers merge, in what they differ. No I/O but in `walk`."""
