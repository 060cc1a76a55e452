"""`neuronpipe completion`: prints the script that completes commands, options and models in a shell."""

import argparse

from neuronpipe.cli.terminal import option

HELP = "print the script by which a shell completes commands, options and the names of models"
EXTRA = "completion"


def add_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "shell SHELL", "bash, zsh or fish", choices=("bash", "zsh", "fish"))


def run(options: argparse.Namespace) -> None:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["neuronpipe"], shell=options.shell))
