"""`python -m neuronpipe.api.protos --out DIR` writes the .proto files of the public API."""

import argparse
import sys
from pathlib import Path

from neuronpipe.api.protos import write_protos

parser = argparse.ArgumentParser("python -m neuronpipe.api.protos", description="Writes the protos of the public API.")
parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write to, for protoc's -I")
options = parser.parse_args()
try:
    write_protos(options.out)
except OSError as error:
    sys.exit(f"python -m neuronpipe.api.protos: --out {options.out}: {error.strerror}")
