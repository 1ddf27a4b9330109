"""What runs inside an agent's sandbox."""
