"""Models of MLflow's registry, as folders to compile: versions that have the flavor transformers.

See https://mlflow.org/docs/latest/ml/deep-learning/transformers: a model's own files are in the folder `model_binary`
of its MLmodel file, its tokenizer and processors each in a folder of `components`. The only file that knows mlflow.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from neuronpipe.core.errors import SetupError


def fetch_mlflow_model(model: str, tracking_uri: str, scratch: Path) -> tuple[Path, str]:
    """Downloads a version. Returns the folder of its files, as transformers saves them, and where it came from.

    `model`: NAME for the newest, NAME/VERSION, or NAME@ALIAS; `tracking_uri`: as MLflow has it, empty: as
    MLFLOW_TRACKING_URI says. Credentials are those of MLflow's variables.

    Raises SetupError where there is no such version, or one that is not of transformers.
    """
    # Its client would report over the network how it is used.
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
        found = _find(MlflowClient(), model)
        origin = f"MLflow models:/{found.name}/{found.version}" + (f", run {found.run_id}" if found.run_id else "")
        downloaded = mlflow.artifacts.download_artifacts(f"models:/{found.name}/{found.version}", dst_path=str(scratch))
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
    found = client.search_model_versions(f"name = '{name}'")
    if not found:
        raise SetupError(f"MLflow: {model}: no such model, or no version of it")
    return max(found, key=lambda one: int(one.version))


def _assemble(downloaded: Path, folder: Path, origin: str) -> Path:
    """One folder of the files that MLflow has in several."""
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
