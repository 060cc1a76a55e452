"""Measures one peer alone and prints JSON.

Run: python -m tests.bench.peers --peer NAME --callers 1,32 --seconds 5 [--texts FILE] [-- --threads 1 …]
What follows `--` are settings of the peer's launcher. Exit code 1: the peer is not available, and the reason is
printed.
"""

import argparse
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from tests.bench.peers.running import PEERS, PeerUnavailable, running_peer
from tests.bench.texts import make_texts

_TEXTS = 1024


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="Measures one peer alone and prints JSON.")
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--callers", type=lambda counts: [int(count) for count in counts.split(",")], default=[1, 32])
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument(
        "--texts", type=Path, help="JSON list of texts of at most 128 tokens; left out: the benchmark's own"
    )
    parser.add_argument("settings", nargs="*", help="settings of the peer's launcher, after --")
    options = parser.parse_args()
    # The blocks below end what they started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    texts = json.loads(options.texts.read_text()) if options.texts else make_texts(_TEXTS)
    try:
        with running_peer(options.peer, texts, options.settings) as peer:
            results = [asdict(peer.measure(callers, options.seconds)) for callers in options.callers]
    except PeerUnavailable as unavailable:
        print(json.dumps({"peer": unavailable.name, "unavailable": unavailable.reason}))
        return 1
    print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
