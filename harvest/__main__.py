"""`python -m harvest` is the command `harvest`."""

from harvest.cli import main

main()
