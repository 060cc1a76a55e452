"""`neuronpipe compile`: its options, and the request to the compiler. Imports the compiler only when it runs."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.cli.repository import folder
from neuronpipe.cli.terminal import ending_on_sigterm
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.parts import BALANCES

if TYPE_CHECKING:
    from neuronpipe.bundles.signing import SigningKey
    from neuronpipe.compiler import BucketRequest


HELP = "compile a Transformers model into a bundle"
EXTRA = "compile"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("source", metavar="SOURCE", help="local folder of a model, or its id on the Hugging Face Hub")
    parser.add_argument(
        "--task",
        default="",
        help="what to compile for, such as text-classification, rerank or sentence-embedding (default: found in its "
        "configuration)",
    )
    parser.add_argument("--repository", required=True, type=folder, metavar="DIR", help="folder of bundles to write to")
    parser.add_argument("--name", help="the model's name in requests (default: the last part of SOURCE)")
    parser.add_argument("--version", type=int, metavar="V", help="the bundle's version (default: the next free one)")
    parser.add_argument(
        "--if-missing",
        action="store_true",
        help="do nothing if the repository already has the model for this back end",
    )
    parser.add_argument(
        "--sign-key",
        type=Path,
        metavar="FILE",
        help="sign the bundle with this ed25519 private key, in PEM form without a passphrase; see `neuronpipe bundle`",
    )
    parser.add_argument(
        "--approve",
        action="store_true",
        help="approve the new version in the repository's registry; see `neuronpipe registry`",
    )
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument(
        "--merge-adapter",
        action="store_true",
        help="SOURCE is an adapter (LoRA): merge it into its base model and compile the result",
    )
    parser.add_argument(
        "--base-model",
        default="",
        metavar="MODEL",
        help="the adapter's base model, folder or id (default: as adapter_config.json says)",
    )
    parser.add_argument("--backend", default="openvino", help="openvino (default), neuronx, torch or fake")
    parser.add_argument(
        "--dtype",
        default="",
        help="float32, bfloat16, float16 (torch), int8 or int8-weights (openvino: computes in int8; or weights alone "
        "are of 8 bits, which "
        "loses less); default: as its weights, or else float32",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="PATH",
        help="for int8: a file of texts like those that the model will get, UTF-8, one a line, or for a model of "
        "images a folder of them; 64 or more, of which every second one is compared on, and the others calibrate "
        "(default: sample text in many languages, or sample images); for sentence-embedding in any dtype: those "
        "compared on give the ranges of int8 vectors",
    )
    parser.add_argument(
        "--max-divergence",
        type=float,
        metavar="X",
        help="fail if an output differs from PyTorch float32 by more than this",
    )
    parser.add_argument(
        "--min-agreement",
        type=float,
        metavar="Y",
        help="fail if the agreement with PyTorch float32 is less (0 to 1): the share of texts with the same best "
        "label or answer, or "
        "the smallest cosine similarity of embeddings; int8 keeps the layers that lose most in float32 until it is met",
    )
    parser.add_argument(
        "--cache-results", action="store_true", help="have gateways cache this model's results (see docs/caching.md)"
    )
    parser.add_argument(
        "--bucket",
        action="append",
        default=[],
        metavar="BATCHxTOKENS",
        help="a shape to compile for, such as 8x128; repeat it for others. Longer inputs are refused. For models "
        "that generate on neuronx: the number of texts at once, and the tokens of the longest",
    )
    parser.add_argument(
        "--buckets", choices=["auto"], help="choose the lengths that leave the least padding, for --lengths"
    )
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help='lengths of real inputs in tokens, a line "LENGTH" or "LENGTH COUNT" for each',
    )
    parser.add_argument(
        "--max-lengths", type=int, metavar="N", help="most bucket lengths of --buckets auto (default: 4)"
    )
    parser.add_argument(
        "--batches", type=_whole_numbers, metavar="B,B", help="batch sizes of --buckets auto (default: 1,8)"
    )

    parser.add_argument(
        "--pipeline-cores",
        type=int,
        default=1,
        metavar="N",
        help="cut the model between layers into N parts, each for a core of its own (openvino and neuronx; default: 1)",
    )
    parser.add_argument(
        "--pipeline-balance",
        default="time",
        choices=BALANCES,
        help="what is to be equal in all parts (default: time)",
    )
    parser.add_argument(
        "--device-times",
        default="",
        metavar="TABLE",
        help="for fake: simulate a device, inf2-bert-base or inf2-distilbert",
    )
    neuron = parser.add_argument_group("for neuronx")
    neuron.add_argument(
        "--target", default="inf2", choices=["inf2", "trn1", "trn1n"], help="instances to compile for (default: inf2)"
    )
    neuron.add_argument(
        "--optlevel", type=int, default=2, choices=[1, 2, 3], help="the compiler's optimization level (default: 2)"
    )
    neuron.add_argument(
        "--model-type", default="transformer", choices=["transformer", "generic"], help="default: transformer"
    )
    neuron.add_argument(
        "--auto-cast",
        default="",
        choices=["none", "matmult", "all"],
        help="what to compute in bfloat16 (default: matmult with that --dtype)",
    )
    neuron.add_argument(
        "--attention",
        default="eager",
        choices=["eager", "sdpa"],
        help="form of attention that is traced (default: eager)",
    )
    neuron.add_argument(
        "--compile-workers", type=int, default=1, metavar="N", help="buckets compiled at once (default: 1)"
    )
    neuron.add_argument(
        "--compile-cache",
        type=Path,
        default=Path("~/.cache/neuronpipe/neuronx"),
        metavar="DIR",
        help="where compiled buckets are kept, so that none is compiled twice (default: ~/.cache/neuronpipe/neuronx)",
    )


def _whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers with commas") from None


def run(options: argparse.Namespace) -> None:
    """Prints the bundle's folder. Raises SetupError."""
    with ending_on_sigterm():
        print(_compile(options))


def _compile(options: argparse.Namespace) -> Path:
    """Compiles and returns the bundle's folder; with --if-missing, it may be an existing one. Raises SetupError."""
    from neuronpipe.bundles.repository import check_is_there, default_name, newest_bundle, read_bundle

    name = options.name if options.name is not None else default_name(options.source)
    signing_key = _signing_key(options.sign_key)
    if options.if_missing and (present := newest_bundle(options.repository, name, options.backend)):
        if signing_key:
            # It is not signed here: who knows who put it there.
            read_bundle(present.folder, signing_key.trusted()).files.check()
        return present.folder
    check_is_there(options.source)  # before the import of the compiler, which takes seconds

    from neuronpipe.compiler import CompileRequest, NeuronxOptions, PipelineOptions, compile_bundle

    request = CompileRequest(
        source=options.source,
        revision=options.revision,
        task=options.task.replace("-", "_"),
        repository=options.repository,
        name=name,
        version=options.version,
        backend=options.backend,
        dtype=options.dtype,
        calibration=options.calibration,
        buckets=_bucket_request(options),
        device_times=options.device_times,
        pipeline=PipelineOptions(options.pipeline_cores, options.pipeline_balance),
        neuronx=NeuronxOptions(
            target=options.target,
            model_type=options.model_type,
            optlevel=options.optlevel,
            auto_cast=options.auto_cast,
            attention=options.attention,
            workers=options.compile_workers,
            cache=options.compile_cache,
        ),
        max_divergence=options.max_divergence,
        min_agreement=options.min_agreement,
        cache_results=options.cache_results,
        merge_adapter=options.merge_adapter,
        base_model=options.base_model,
        signing_key=signing_key,
    )
    bundle = compile_bundle(request, lambda line: print(line, file=sys.stderr, flush=True))
    if options.approve:
        from neuronpipe.bundles.registry import Signed
        from neuronpipe.bundles.sources import FolderRepository

        signed = Signed(note="compiled with --approve")
        FolderRepository(options.repository).change_registry(
            lambda registry: registry.approve(bundle, signed), signed, bundle.key
        )
    return bundle.folder


def _signing_key(path: Path | None) -> "SigningKey | None":
    """The key of --sign-key. Raises SetupError."""
    if path is None:
        return None
    from neuronpipe.bundles.signing import SigningKey

    return SigningKey.read(path, "--sign-key")


def _bucket_request(options: argparse.Namespace) -> "BucketRequest":
    from neuronpipe.compiler import BucketRequest

    if options.buckets and options.bucket:
        raise SetupError("--buckets auto chooses the buckets; leave out --bucket")
    chosen = (options.buckets,) if options.buckets else tuple(options.bucket)
    return BucketRequest(chosen, options.lengths, options.max_lengths, options.batches)
