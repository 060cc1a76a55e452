"""`neuronpipe deploy`: from a model to an endpoint."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.deploy.model import Target

HELP = "deploy a model: in containers of this machine, on Kubernetes, or on Amazon SageMaker"
EXTRA = "deploy"

_TARGETS = ("compose", "kubernetes", "sagemaker")
# Of each place, the options that only it has.
_OPTIONS = {
    "compose": ("port", "http_port"),
    "kubernetes": ("out", "model_image"),
    "sagemaker": ("image", "role", "bucket", "instance_type", "asynchronous"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "source", metavar="SOURCE", help="the model: an id on the Hugging Face Hub, a folder of its files, or a bundle"
    )
    add_place(parser)
    parser.add_argument(
        "--name", default="", help="of the endpoint, and of the model (default: the last part of SOURCE)"
    )
    parser.add_argument(
        "--task", default="", help="as for `neuronpipe compile`; needed where SOURCE is not compiled here"
    )
    parser.add_argument("--dtype", default="", help="as for `neuronpipe compile`")
    parser.add_argument("--backend", default="openvino", help="openvino (default), neuronx or torch")
    parser.add_argument(
        "--memory-mb",
        type=int,
        metavar="M",
        help="serverless: memory of what runs the model, 1024 to 6144 in steps of 1024 (default with "
        "--max-concurrency: 2048)",
    )
    parser.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="serverless: requests at once at a gateway, 1 to 200; more are refused (default with --memory-mb: 5)",
    )
    parser.add_argument(
        "--min",
        type=int,
        default=1,
        dest="min_executors",
        metavar="N",
        help="fewest executors, or instances (default: 1); 0: none while there are no calls",
    )
    parser.add_argument(
        "--max", type=int, dest="max_executors", metavar="N", help="most of them (default: as --min, at least 1)"
    )
    containers = parser.add_argument_group("for compose and kubernetes")
    containers.add_argument(
        "--image-prefix",
        default="neuronpipe",
        metavar="PREFIX",
        help="images are PREFIX/gateway:VERSION and so on (default: neuronpipe)",
    )
    containers.add_argument(
        "--image-version", metavar="VERSION", help="their tag (default: the version of this program)"
    )
    containers.add_argument("--port", type=int, metavar="PORT", help="compose: port of 127.0.0.1 (default: 50050)")
    containers.add_argument(
        "--http-port", type=int, metavar="PORT", help="compose: port of 127.0.0.1 for HTTP (default: 8080)"
    )
    containers.add_argument(
        "--out", type=Path, metavar="DIR", help="kubernetes: where manifests are written (default: neuronpipe-NAME)"
    )
    containers.add_argument(
        "--model-image", metavar="IMAGE", help="kubernetes: compile here and push the bundle as this image"
    )
    sagemaker = parser.add_argument_group("for sagemaker")
    sagemaker.add_argument("--image", metavar="URI", help="the image sagemaker in ECR")
    sagemaker.add_argument("--role", metavar="ARN", help="the execution role")
    sagemaker.add_argument("--bucket", metavar="S3-URI", help="s3://BUCKET/PREFIX for the bundle")
    sagemaker.add_argument("--instance-type", metavar="TYPE", help="default: ml.c5.xlarge; not of serverless endpoints")
    sagemaker.add_argument(
        "--asynchronous", metavar="S3-URI", help="an asynchronous endpoint, with results below s3://BUCKET/PREFIX"
    )


def add_place(parser: argparse.ArgumentParser) -> None:
    """Where an endpoint is, for both commands."""
    parser.add_argument("--to", required=True, choices=_TARGETS, metavar="PLACE", help=", ".join(_TARGETS))
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")


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

    serverless = {
        name: value for name in ("memory_mb", "max_concurrency") if (value := getattr(options, name)) is not None
    }
    fewest = options.min_executors
    endpoint = Endpoint(
        name=options.name or endpoint_name(options.source),
        source=options.source,
        task=options.task,
        dtype=options.dtype,
        backend=options.backend,
        serverless=ServerlessConfig(**serverless) if serverless else None,
        min_executors=fewest,
        max_executors=max(fewest, 1) if options.max_executors is None else options.max_executors,
        image_prefix=options.image_prefix,
        version=options.image_version or __version__,
    )
    return make_target(options.to, endpoint, **_options_of(options))


def _options_of(options: argparse.Namespace) -> dict[str, Any]:
    """Those of the place. Raises SetupError for one of another."""
    given = {name: getattr(options, name) for names in _OPTIONS.values() for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    if others := given.keys() - set(_OPTIONS[options.to]):
        words = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in others))
        raise SetupError(f"{words}: not of --to {options.to}")
    return given


def report(line: str) -> None:
    """Tells people what is done; standard output has the call alone."""
    print(line, file=sys.stderr, flush=True)
