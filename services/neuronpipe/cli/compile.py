"""`neuronpipe compile`: its options, and the request to the compiler. Imports the compiler only when it runs."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.cli.repository import folder
from neuronpipe.cli.terminal import ending_on_sigterm, made, option, report, whole_numbers
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.parts import BALANCES

if TYPE_CHECKING:
    from neuronpipe.bundles.signing import SigningKey
    from neuronpipe.compiler import BucketRequest


HELP = "compile a Transformers model into a bundle"
EXTRA = "compile"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    option(parser, "source SOURCE", "local folder of a model, or its id on the Hugging Face Hub")
    option(
        parser,
        "--task TASK",
        "task to compile for, such as text-classification, rerank or sentence-embedding (default: found in its "
        "configuration)",
        "",
    )
    option(parser, "--repository DIR", "folder of bundles to write to", folder, required=True)
    option(parser, "--name NAME", "the model's name in requests (default: the last part of SOURCE)")
    option(parser, "--version V", "the bundle's version (default: the next free number)", int)
    option(parser, "--if-missing", "do nothing if the repository already has the model for this back end")
    option(
        parser,
        "--sign-key FILE",
        "sign the bundle with this ed25519 private key, in PEM form without a passphrase; see `neuronpipe bundle`",
        Path,
    )
    option(parser, "--approve", "approve the new version in the repository's registry; see `neuronpipe registry`")
    option(parser, "--revision REVISION", "branch, tag or commit on the Hub")
    option(parser, "--merge-adapter", "SOURCE is an adapter (LoRA): merge it into its base model, and compile that")
    option(parser, "--base-model MODEL", "the adapter's base model, folder or id (default: by adapter_config.json)", "")
    option(
        parser,
        "--adapter NAME=FOLDER",
        "a LoRA adapter of SOURCE in the same bundle, which requests name as MODEL/NAME; repeat it for others",
        default=[],
        action="append",
        dest="adapters",
    )
    option(parser, "--backend BACKEND", "openvino (default), neuronx, torch or fake", "openvino")
    option(
        parser,
        "--dtype DTYPE",
        "float32, bfloat16, float16 (torch), int8 or int8-weights (openvino: computes in int8; or weights alone are "
        "of 8 bits, which loses less); default: as its weights; float32 for models that generate",
        "",
    )
    option(
        parser,
        "--calibration PATH",
        "file of texts for int8, like the texts that the model will get, UTF-8, one per line, or a folder of images; "
        "64 or more, half of them for calibration and half for the comparison (default: sample text in many languages, "
        "or sample images); for sentence-embedding in any dtype, the compared texts give the ranges of int8 vectors",
        Path,
    )
    option(parser, "--max-divergence X", "fail if an output differs from PyTorch float32 by more than this", float)
    option(
        parser,
        "--min-agreement Y",
        "fail if the agreement with PyTorch float32 is less (0 to 1): the share of texts with the same best label or "
        "answer, or the smallest cosine similarity of embeddings; int8 keeps the layers that lose most in float32 "
        "until it is met",
        float,
    )
    option(parser, "--cache-results", "have gateways cache this model's results (see docs/caching.md)")
    option(
        parser,
        "--bucket BATCHxTOKENS",
        "a shape to compile for, such as 8x128; repeat it for others. Longer inputs are refused. For models that "
        "generate on neuronx: the number of texts at once, and the tokens of the longest",
        default=[],
        action="append",
    )
    option(parser, "--buckets", "choose the lengths that leave the least padding, for --lengths", choices=["auto"])
    option(parser, "--lengths FILE", "lengths of real inputs in tokens, each on a line: LENGTH, or LENGTH COUNT", Path)
    option(parser, "--max-lengths N", "maximum number of bucket lengths of --buckets auto (default: 4)", int)
    option(parser, "--batches B,B", "batch sizes of --buckets auto (default: 1,8)", whole_numbers)

    option(
        parser, "--pipeline-cores N", "cut the model into N parts, each for a core (openvino, neuronx; default: 1)", 1
    )
    option(parser, "--pipeline-balance", "quantity that parts share equally (default: time)", "time", choices=BALANCES)
    option(
        parser,
        "--rerank-template TEXT",
        "template of a decoder that ranks, with {query}, {document} and {instruction}, \\n for a line end, and {|} "
        "between parts that are encoded apart (default: by its files)",
        "",
    )
    option(parser, "--rerank-instruction TEXT", "instruction in that template (default: by the files)", "")
    option(
        parser,
        "--rerank-answers YES,NO",
        "tokens whose logits make the score, or one token (default: by the files)",
        "",
    )
    neuron = parser.add_argument_group("for neuronx")
    option(neuron, "--target", "instances to compile for (default: inf2)", "inf2", choices=["inf2", "trn1", "trn1n"])
    option(neuron, "--optlevel", "the compiler's optimization level (default: 2)", 2, choices=[1, 2, 3])
    option(
        neuron, "--model-type", "model type (default: transformer)", "transformer", choices=["transformer", "generic"]
    )
    option(
        neuron,
        "--auto-cast",
        "operations to compute in bfloat16 (default: matmult with that --dtype)",
        "",
        choices=["none", "matmult", "all"],
    )
    option(neuron, "--attention", "form of the traced attention (default: eager)", "eager", choices=["eager", "sdpa"])
    option(neuron, "--compile-workers N", "buckets compiled at once (default: 1)", 1, dest="workers")
    option(
        neuron,
        "--compile-cache DIR",
        "folder of compiled buckets, so that none is compiled twice (default: ~/.cache/neuronpipe/neuronx)",
        Path("~/.cache/neuronpipe/neuronx"),
        dest="cache",
    )


def run(options: argparse.Namespace) -> None:
    """Prints the bundle's folder. Raises SetupError."""
    with ending_on_sigterm():
        print(_compile(options))


def _compile(options: argparse.Namespace) -> Path:
    """Compiles and returns the bundle's folder; with --if-missing, an existing folder. Raises SetupError."""
    from neuronpipe.bundles.repository import read_bundle
    from neuronpipe.bundles.writing import check_is_there, default_name, newest_bundle

    name = options.name if options.name is not None else default_name(options.source)
    signing_key = _signing_key(options.sign_key)
    if options.if_missing and (present := newest_bundle(options.repository, name, options.backend)):
        if signing_key:
            # The existing bundle is not signed here: its origin is unknown.
            read_bundle(present.folder, signing_key.trusted()).files.check()
        return present.folder
    check_is_there(options.source)  # before the import of the compiler, which takes seconds

    from neuronpipe.compiler import CompileRequest, NeuronxOptions, PipelineOptions, RerankerOptions, compile_bundle

    request = made(
        CompileRequest,
        options,
        task=options.task.replace("-", "_"),
        name=name,
        adapters=tuple(options.adapters),
        buckets=_bucket_request(options),
        pipeline=PipelineOptions(options.pipeline_cores, options.pipeline_balance),
        neuronx=made(NeuronxOptions, options),
        reranker=RerankerOptions(
            options.rerank_template.replace("\\n", "\n"), options.rerank_instruction, options.rerank_answers
        ),
        signing_key=signing_key,
    )
    bundle = compile_bundle(request, report)
    if options.approve:
        from neuronpipe.bundles.folder_repository import FolderRepository
        from neuronpipe.bundles.registry import Signed

        signed = Signed(note="compiled with --approve")
        FolderRepository(options.repository).change_registry(
            lambda registry: registry.approve(bundle, signed), signed, bundle.key
        )
    return bundle.folder


def _signing_key(path: Path | None) -> "SigningKey | None":
    """Reads the key of --sign-key. Raises SetupError."""
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
