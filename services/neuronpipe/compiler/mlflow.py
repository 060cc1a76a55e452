"""Models of MLflow's registry as folders to compile: versions with the flavor transformers.

See https://mlflow.org/docs/latest/ml/deep-learning/transformers. A model's own files are in the folder `model_binary`
of its MLmodel file, its tokenizer and processors each in a folder of `components`. The only file that imports mlflow.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from neuronpipe.core.errors import SetupError


def fetch_mlflow_model(model: str, tracking_uri: str, scratch: Path) -> tuple[Path, str]:
    """Downloads a version. Returns the folder with the files of the transformers model, and their origin.

    `model`: NAME for the newest version, NAME/VERSION, or NAME@ALIAS. `tracking_uri`: in the form of MLflow; empty: the
    value of MLFLOW_TRACKING_URI. Credentials are in MLflow's variables.

    Raises SetupError if the version is missing, or is not a transformers model.
    """
    # MLflow's client would report over the network how it is used.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        import mlflow
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise SetupError("registry import mlflow: needs mlflow: pip install 'neuronpipe[mlflow]'") from error
    try:
        if tracking_uri:
            mlflow.set_tracking_uri(tracking_uri)
            mlflow.set_registry_uri(tracking_uri)
        version = _find(MlflowClient(), model)
        origin = f"MLflow models:/{version.name}/{version.version}" + (
            f", run {version.run_id}" if version.run_id else ""
        )
        downloaded = mlflow.artifacts.download_artifacts(
            f"models:/{version.name}/{version.version}", dst_path=str(scratch)
        )
    except MlflowException as error:
        raise SetupError(f"MLflow: {model}: {str(error).splitlines()[0]}") from error
    return _assemble(Path(downloaded), scratch / "source", origin), origin


def _find(client: Any, model: str) -> Any:
    name, slash, version = model.partition("/")
    if slash:
        return client.get_model_version(name, version)
    name, at, alias = model.partition("@")
    if at:
        return client.get_model_version_by_alias(name, alias)
    versions = client.search_model_versions(f"name = '{name}'")
    if not versions:
        raise SetupError(f"MLflow: {model}: no such model, or no version of it")
    return max(versions, key=lambda version: int(version.version))


def _assemble(downloaded: Path, folder: Path, origin: str) -> Path:
    """Copies the files that MLflow stores in several folders into one folder."""
    try:
        flavors = yaml.safe_load((downloaded / "MLmodel").read_bytes())["flavors"]
    except (OSError, KeyError, TypeError, yaml.YAMLError) as error:
        raise SetupError(f"{origin}: has no valid MLmodel file") from error
    flavor = flavors.get("transformers")
    if flavor is None:
        raise SetupError(f"{origin}: has the flavors {', '.join(sorted(flavors))}; only transformers can be imported")
    if "model_binary" not in flavor or "peft_adaptor" in flavor:
        raise SetupError(
            f"{origin}: has no weights of its own, only those of an adapter or the name of a model "
            f"({flavor.get('source_model_name', 'not given')}); compile that one with `neuronpipe compile`"
        )
    parts = [*(f"components/{component}" for component in flavor.get("components", ())), flavor["model_binary"]]
    for part in parts:
        if not (downloaded / part).resolve().is_relative_to(downloaded.resolve()):
            raise SetupError(f"{origin}: its MLmodel file names {part!r}, which is outside of the model")
        if (downloaded / part).is_dir():
            shutil.copytree(downloaded / part, folder, dirs_exist_ok=True)
    return folder
