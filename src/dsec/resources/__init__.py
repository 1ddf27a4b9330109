"""What a sandbox may use and does use: cgroups and uid ranges."""
