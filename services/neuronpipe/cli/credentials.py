"""The options with which commands show servers who they are: files of TLS, and the key of a caller."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.platform.tls import TlsFiles


def add_tls(parser: argparse.ArgumentParser) -> None:
    """Adds the options that tls_files reads."""
    parser.add_argument(
        "--tls-ca",
        default="",
        metavar="FILE",
        help="connect by TLS; the authorities of the server's certificate, in PEM form",
    )
    parser.add_argument(
        "--tls-certificate", default="", metavar="FILE", help="the certificate to show the server, in PEM form"
    )
    parser.add_argument("--tls-key", default="", metavar="FILE", help="the private key of --tls-certificate")


def tls_files(options: argparse.Namespace) -> "TlsFiles | None":
    """The files that the options name, None where TLS is not asked for. Raises SetupError."""
    from neuronpipe.platform.tls import TlsFiles

    files = TlsFiles(options.tls_certificate, options.tls_key, options.tls_ca)
    if files.certificate and not files.ca:
        raise SetupError("--tls-certificate: needs --tls-ca, the authorities of the server's certificate")
    return files if files.ca else None


def add_key(parser: argparse.ArgumentParser) -> None:
    """Adds --api-key-file. A key itself is never an option: other users of a machine see its command lines."""
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file of the API key or token to call with (default: the variable NEURONPIPE_API_KEY)",
    )


def use_key_of(path: Path) -> None:
    """Lets the command, and the processes that it starts, call with the key of a file. Raises SetupError."""
    from neuronpipe.rpc.api_key import VARIABLE

    try:
        os.environ[VARIABLE] = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else "holds no key"
        raise SetupError(f"--api-key-file {path}: {problem}") from error
