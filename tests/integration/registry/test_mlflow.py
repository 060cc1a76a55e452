"""`neuronpipe registry import mlflow`, against a server of MLflow.

NEURONPIPE_MLFLOW: the program `mlflow` of an environment with the whole of MLflow, which has the server.
"""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from neuronpipe.bundles.folder_repository import FolderRepository
from neuronpipe.bundles.repository import read_bundle
from neuronpipe.compiler.mlflow import fetch_mlflow_model
from neuronpipe.core.errors import SetupError
from tests.servers.ports import free_port
from tests.servers.web import running_web_server

pytestmark = [
    pytest.mark.local_only,
    pytest.mark.skipif("NEURONPIPE_MLFLOW" not in os.environ, reason="NEURONPIPE_MLFLOW names no server of MLflow"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of MLflow's server."""
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    url = f"http://127.0.0.1:{port}"
    command = [os.environ["NEURONPIPE_MLFLOW"], "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/db", "--artifacts-destination", f"{folder}/artifacts"]
    with running_web_server(command, urllib.request.Request(f"{url}/health"), limit_s=120, folder=folder):
        yield url


@pytest.fixture(scope="module")
def registered(server: str, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model `classifier` in MLflow's registry, laid out as mlflow.transformers does, and one of scikit-learn."""
    import mlflow  # takes a second, which nobody else who collects these tests shall wait

    client, folder = mlflow.MlflowClient(tracking_uri=server), tmp_path_factory.mktemp("saved")
    flavors: dict[str, dict[str, dict[str, object]]] = {
        "classifier": {"transformers": {"model_binary": "model", "components": ["tokenizer"], "task": "x"}},
        "forest": {"sklearn": {}},
    }
    for name, found in flavors.items():
        saved = folder / name
        for part in "model", "components/tokenizer":
            (saved / part).mkdir(parents=True)
        for path in sources["classifier"].iterdir():
            is_tokenizers = "token" in path.name or path.name == "vocab.txt"
            (saved / ("components/tokenizer" if is_tokenizers else "model") / path.name).write_bytes(path.read_bytes())
        (saved / "MLmodel").write_text(yaml.safe_dump({"flavors": found}))
        run = client.create_run("0").info.run_id
        client.log_artifacts(run, str(saved), "saved")
        client.create_registered_model(name)
        version = client.create_model_version(name, f"runs:/{run}/saved", run).version
        client.set_registered_model_alias(name, "champion", version)
    return server


def test_a_model_of_mlflow_becomes_a_version_that_says_where_it_came_from(registered: str, tmp_path: Path) -> None:
    repository = tmp_path / "models"

    def run(model: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "neuronpipe", "registry", "import", "mlflow", model, "--backend", "fake"]
        command += ["--tracking-uri", registered, "--repository", str(repository), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    for model, name, options, state in (
        ("classifier@champion", "classifier", ("--approve",), "approved"),
        ("classifier", "other", ("--name", "other"), "pending"),
    ):
        done = run(model, *options)
        assert done.returncode == 0, done.stderr
        versions = FolderRepository(repository).read_registry().models[name].versions
        approval = versions[max(versions)].approval
        assert approval.state == state
        assert approval.note.startswith("imported from MLflow models:/classifier/1, run ")
        read_bundle(repository / name / str(max(versions))).files.check()


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("forest", "has the flavors sklearn; only transformers can be imported"),
        ("none", "no such model, or no version of it"),
        ("classifier/9", "not found"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(registered: str, tmp_path: Path, model: str, problem: str) -> None:
    with pytest.raises(SetupError, match=problem):
        fetch_mlflow_model(model, registered, tmp_path / "scratch")
