"""How a sandbox reaches the network, where it may."""
