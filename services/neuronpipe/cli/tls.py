"""The options with which commands reach servers over TLS."""

import argparse
from typing import TYPE_CHECKING

from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.platform.tls.files import TlsFiles


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
    from neuronpipe.platform.tls.files import TlsFiles

    files = TlsFiles(options.tls_certificate, options.tls_key, options.tls_ca)
    if files.certificate and not files.ca:
        raise SetupError("--tls-certificate: needs --tls-ca, the authorities of the server's certificate")
    return files if files.ca else None
