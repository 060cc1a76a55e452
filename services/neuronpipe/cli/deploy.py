"""`neuronpipe deploy`: from a model to an endpoint."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuronpipe.cli.terminal import made, option, report
from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.deploy.model import Target

HELP = "deploy a model: in containers of this machine, on Kubernetes, or on Amazon SageMaker"
EXTRA = "deploy"

_TARGETS = ("compose", "kubernetes", "sagemaker")
# The options that only one target has, by target.
_OPTIONS = {
    "compose": ("port", "http_port"),
    "kubernetes": ("out", "model_image"),
    "sagemaker": ("image", "role", "bucket", "instance_type", "asynchronous"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "source SOURCE", "the model: an id on the Hugging Face Hub, a folder of its files, or a bundle")
    add_place(parser)
    option(parser, "--name NAME", "name of the endpoint, and of the model (default: the last part of SOURCE)", "")
    option(parser, "--task TASK", "task, see `neuronpipe compile`; needed if SOURCE is not compiled here", "")
    option(parser, "--dtype DTYPE", "dtype, see `neuronpipe compile`", "")
    option(parser, "--backend BACKEND", "openvino (default), neuronx or torch", "openvino")
    option(
        parser,
        "--memory-mb M",
        "serverless: memory of the model's process, 1024 to 6144 in steps of 1024 (default with --max-concurrency: "
        "2048)",
        int,
    )
    option(
        parser,
        "--max-concurrency N",
        "serverless: requests at once at a gateway, 1 to 200; more are refused (default with --memory-mb: 5)",
        int,
    )
    option(
        parser,
        "--min N",
        "minimum number of executors, or instances (default: 1); 0: none while there are no calls",
        1,
        dest="min_executors",
    )
    option(
        parser,
        "--max N",
        "maximum number of executors, or instances (default: --min, at least 1)",
        int,
        dest="max_executors",
    )
    containers = parser.add_argument_group("for compose and kubernetes")
    option(
        containers,
        "--image-prefix PREFIX",
        "images are PREFIX/gateway:VERSION and so on (default: neuronpipe)",
        "neuronpipe",
    )
    option(containers, "--image-version VERSION", "tag of the images (default: the version of this program)")
    option(containers, "--port PORT", "compose: port of 127.0.0.1 (default: 50050)", int)
    option(containers, "--http-port PORT", "compose: port of 127.0.0.1 for HTTP (default: 8080)", int)
    option(containers, "--out DIR", "kubernetes: folder of the manifests (default: neuronpipe-NAME)", Path)
    option(containers, "--model-image IMAGE", "kubernetes: compile here and push the bundle as this image")
    sagemaker = parser.add_argument_group("for sagemaker")
    option(sagemaker, "--image URI", "the image sagemaker in ECR")
    option(sagemaker, "--role ARN", "the execution role")
    option(sagemaker, "--bucket S3-URI", "s3://BUCKET/PREFIX for the bundle")
    option(sagemaker, "--instance-type TYPE", "instance type, except of serverless endpoints (default: ml.c5.xlarge)")
    option(sagemaker, "--asynchronous S3-URI", "an asynchronous endpoint, with results below s3://BUCKET/PREFIX")


def add_place(parser: argparse.ArgumentParser) -> None:
    option(parser, "--to PLACE", ", ".join(_TARGETS), required=True, choices=_TARGETS)
    option(parser, "--dry-run", "print what would be done, and do nothing")


def run(options: argparse.Namespace) -> None:
    """Deploys, and prints the call. Raises SetupError."""
    from neuronpipe.deploy.endpoint import take

    target = _target(options)
    try:
        take(target.deploying(), report, is_dry=options.dry_run)
    except SetupError as error:
        if options.dry_run:
            raise
        undo = f"neuronpipe undeploy {target.name} --to {options.to}"
        raise SetupError(f"{error}\nwhat was made until then is there; to delete it: {undo}") from error
    report("call it with:")
    print(target.call())


def _target(options: argparse.Namespace) -> "Target":
    from neuronpipe import __version__
    from neuronpipe.deploy.endpoint import Endpoint, ServerlessConfig, endpoint_name
    from neuronpipe.deploy.model import make_target

    limits = {"memory_mb": options.memory_mb, "max_concurrency": options.max_concurrency}
    serverless = {name: value for name, value in limits.items() if value is not None}
    fewest = options.min_executors
    endpoint = made(
        Endpoint,
        options,
        name=options.name or endpoint_name(options.source),
        serverless=ServerlessConfig(**serverless) if serverless else None,
        max_executors=max(fewest, 1) if options.max_executors is None else options.max_executors,
        version=options.image_version or __version__,
    )
    return make_target(options.to, endpoint, **_options_of(options))


def _options_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of the target. Raises SetupError if an option is for another target."""
    values = {name: getattr(options, name) for names in _OPTIONS.values() for name in names}
    values = {name: value for name, value in values.items() if value is not None}
    if others := values.keys() - set(_OPTIONS[options.to]):
        words = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in others))
        raise SetupError(f"{words}: not of --to {options.to}")
    return values
