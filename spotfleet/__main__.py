"""`python -m spotfleet`: the console script where its folder is not on PATH."""

from spotfleet.cli import main

main()
