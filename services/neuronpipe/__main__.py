"""`python -m neuronpipe` is the command `neuronpipe`."""

from neuronpipe.cli import main

main()
