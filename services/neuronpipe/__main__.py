"""`python -m neuronpipe` is the command `neuronpipe`."""

import signal


def main() -> None:
    """Runs the command. Until it is known, Ctrl-C ends the process without a word."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from neuronpipe.cli import main

    main()


if __name__ == "__main__":
    main()
