"""`python -m dsec.cli`."""

from dsec.cli import main

main()
