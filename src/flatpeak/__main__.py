"""`python -m flatpeak` is the `flatpeak` command."""

from flatpeak.cli.main import main

main()
