"""`python -m tests.deploy`: renders sets in which each two parts meet, or with --all every set, and ends with 1 where
something is wrong.
"""

import json
import subprocess
import sys

from tests.deploy.combinations import all_rendered, kustomize
from tests.deploy.objects import Objects
from tests.deploy.rules import RULES
from tests.deploy.schemas import VERSIONS, faults_of_schema


def main() -> None:
    """Prints each fault once, with the first set that has it."""
    faults: dict[str, str] = {}
    seen: set[str] = set()
    sets = 0
    try:
        for name, manifests in all_rendered(kustomize(), every="--all" in sys.argv[1:]):
            sets += 1
            for manifest in manifests:
                content = json.dumps(manifest, sort_keys=True)
                if content not in seen:
                    seen.add(content)
                    where = f"{manifest['kind']} {manifest['metadata']['name']}"
                    for fault in faults_of_schema(manifest):
                        faults.setdefault(f"{where}: {fault}", name)
            for rule in RULES:
                for fault in rule(Objects(manifests)):
                    faults.setdefault(f"{fault} [{rule.__name__}]", name)
    except subprocess.CalledProcessError as error:
        sys.exit(f"kustomize: {error.stderr.strip()}")
    if faults:
        sys.exit("\n".join(f"{fault} (in {name})" for fault, name in faults.items()))
    print(f"deploy/: {sets} sets, {len(seen)} objects, Kubernetes {', '.join(VERSIONS)}, {len(RULES)} rules")


if __name__ == "__main__":
    main()
