"""What runs inside a verifier's sandbox."""
