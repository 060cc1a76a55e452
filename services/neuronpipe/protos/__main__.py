"""`python -m neuronpipe.protos --out DIR`."""

import argparse
import sys
from pathlib import Path

from neuronpipe.protos import write_protos

parser = argparse.ArgumentParser(prog="python -m neuronpipe.protos", description="Writes the .proto files of the public API.")
parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write below; give it to protoc with -I")
options = parser.parse_args()
try:
    write_protos(options.out)
except OSError as error:
    sys.exit(f"python -m neuronpipe.protos: --out {options.out}: {error.strerror}")
