"""The files of a deployment with mTLS: an authority, and a certificate for each service and for callers."""

import shutil
from pathlib import Path

from neuronpipe.client import TlsFiles
from tests.servers.certificates import LOCAL, Authority, Issued, replace

STAGES = ("tokenizer", "neuron-executor", "postprocessor")
_SERVICES = ("gateway", "all", *STAGES)


class Deployment:
    """A folder for each service, and for the caller "caller", with tls.crt, tls.key and ca.crt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority()
        for name in (*_SERVICES, "caller"):
            self.renew(name)

    def renew(self, name: str, days: tuple[float, float] = (-1, 30)) -> Issued:
        """Replaces a service's certificate by a new certificate, which also names the service by its SPIFFE id."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        ca = folder / "ca.crt"
        # Between here and the new certificate, a server that looks at its files sees no change.
        if not ca.exists() or ca.read_bytes() != self.authority.certificate:
            replace(ca, self.authority.certificate)
        return self.authority.issue(*LOCAL, f"spiffe://tests/{name}", days=days).write(folder)

    def swap(self, name: str) -> None:
        """Replaces the files as Kubernetes does it: makes a new folder, and points a link to it."""
        folder = self.folder / name
        if not folder.is_symlink():
            folder.rename(self.folder / f"{name}-0")
            folder.symlink_to(f"{name}-0")
        new = f"{name}-{int(folder.readlink().name.rpartition('-')[2]) + 1}"
        shutil.copytree(folder, self.folder / new)
        self.authority.issue(*LOCAL, f"spiffe://tests/{name}").write(self.folder / new)
        link = self.folder / f"{name}-new"
        link.symlink_to(new)
        link.replace(folder)

    def files(self, name: str = "caller") -> TlsFiles:
        """Returns the TLS files of a client."""
        folder = self.folder / name
        return TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")

    def options(self, name: str = "caller") -> list[str]:
        """Returns the options of commands for the same files."""
        files = self.files(name)
        return [f"--tls-ca={files.ca}", f"--tls-certificate={files.certificate}", f"--tls-key={files.key}"]

    def environment(self, *, is_mutual: bool = True) -> dict[str, str]:
        """Returns the settings of all services: stages answer the gateway only."""
        variables: dict[str, str] = {}
        for name in _SERVICES:
            prefix = f"NEURONPIPE_{name.replace('-', '_').upper()}_"
            files = self.files(name)
            variables[f"{prefix}TLS_CERTIFICATE"] = str(files.certificate)
            variables[f"{prefix}TLS_KEY"] = str(files.key)
            if is_mutual or name in STAGES:
                variables[f"{prefix}TLS_CLIENT_CA"] = str(files.ca)
            if name in STAGES:
                variables[f"{prefix}ALLOWED_PEERS"] = "spiffe://tests/gateway"
        variables["NEURONPIPE_GATEWAY_TLS_CA"] = str(self.files("gateway").ca)
        return variables
