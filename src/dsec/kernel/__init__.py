"""What Python has no call for: mounts by descriptor, loop devices, btrfs, openat2. The only package with ctypes and raw ioctls.

Every failure is an OSError whose text names the system call, and whose `filename` is the path where there is one. Nothing here knows of
sandboxes or layers.
"""
