"""The compile step: what it reads of a model, what it stores, and what it refuses.

Runs with transformers 4.57.6 as well: .venv-transformers4/bin/python -m pytest tests/contract/test_compile.py
"""

import dataclasses
import hashlib
import http.server
import importlib.metadata
import io
import json
import pydoc_data.topics
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import sentencepiece
import tokenizers
import torch
import transformers

from demo.model import find_minilm
from neuronpipe import cli, compiler
from neuronpipe.bundles.manifest import Accuracy
from neuronpipe.bundles.repository import Bundle, read_bundle
from neuronpipe.bundles.signing import SigningKey, TrustedKeys, create_key
from neuronpipe.compiler import BucketRequest, CompileRequest, NeuronxOptions, compile_bundle
from neuronpipe.compiler.conversion import Conversion
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.openvino import has_bfloat16, openvino
from neuronpipe.stages.tokenizer.text import JsonTokenizer
from tests.models.repository import SMALL, bert_config, save
from tests.models.tokenizers import word_piece

# With the version of transformers of the Neuron SDK, a run takes a sample and `make sampled` all.
pytestmark = [pytest.mark.sampled] if transformers.__version__.startswith("4.") else []

# Largest absolute difference to PyTorch of outputs up to 15; measured 1e-5, the rest is for other CPUs (see
# test_parity.py).
_SMALL_DIFFERENCE = 5e-5

# In RoBERTa's family positions are counted from the one after the padding id 1 on: 514 of them hold 512 tokens.
_ROBERTA_SIZES = {**SMALL, "max_position_embeddings": 514, "type_vocab_size": 1}
_LINES = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).splitlines()[:3000]
_TEXTS = [
    "Hello World, how's it?",
    "  two  spaces\n\tand lines ",
    "Zürich 北京 🤔 cafe\u0301 مرحبا",
    "antidisestablishmentarianism",
    "ﬁne ① Ⅷ ｆｕｌｌ width",
    " ".join(_LINES[200:260]),
]


@pytest.fixture
def compiled(sources: dict[str, Path], tmp_path: Path) -> Callable[..., Bundle]:
    """Compiles the classifier into tmp_path/repository; keyword arguments change the request."""

    def run(**changes: Any) -> Bundle:
        request = CompileRequest(
            source=str(sources["classifier"]),
            task="text_classification",
            repository=tmp_path / "repository",
            name="model",
            backend="fake",
        )
        return compile_bundle(dataclasses.replace(request, **changes), lambda line: None)

    return run


def test_a_bundle_is_signed_as_it_is_compiled(compiled: Callable[..., Bundle], tmp_path: Path) -> None:
    create_key(tmp_path / "key", tmp_path / "public")
    bundle = compiled(signing_key=SigningKey.read(tmp_path / "key", "--sign-key"))
    trusted = read_bundle(bundle.folder, TrustedKeys.read(tmp_path / "public"))
    trusted.files.check()
    assert trusted.signer


def _bert(folder: Path) -> Any:
    transformers.BertForSequenceClassification(bert_config()).save_pretrained(folder)
    shutil.copy(find_minilm() / "vocab.txt", folder)
    return transformers.BertTokenizer.from_pretrained(folder)


def _roberta(folder: Path) -> Any:
    config = transformers.RobertaConfig(vocab_size=600, **_ROBERTA_SIZES)
    transformers.RobertaForSequenceClassification(config).save_pretrained(folder)
    trained = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(_LINES, vocab_size=600, special_tokens=special, show_progress=False)
    trained.save_model(str(folder))  # vocab.json and merges.txt
    return transformers.RobertaTokenizer.from_pretrained(folder)


def _xlm_roberta(folder: Path) -> Any:
    config = transformers.XLMRobertaConfig(vocab_size=602, **_ROBERTA_SIZES)
    transformers.XLMRobertaForSequenceClassification(config).save_pretrained(folder)
    _write_sentencepiece(folder / "sentencepiece.bpe.model", unk_id=0, bos_id=1, eos_id=2, pad_id=-1)
    return transformers.XLMRobertaTokenizer.from_pretrained(folder)


def _camembert(folder: Path) -> Any:
    config = transformers.CamembertConfig(vocab_size=605, **_ROBERTA_SIZES)
    transformers.CamembertForSequenceClassification(config).save_pretrained(folder)
    _write_sentencepiece(folder / "sentencepiece.bpe.model", unk_id=0, bos_id=1, eos_id=2, pad_id=-1)
    return transformers.CamembertTokenizer.from_pretrained(folder)


def _albert(folder: Path) -> Any:
    config = transformers.AlbertConfig(vocab_size=600, embedding_size=16, **SMALL)
    transformers.AlbertForSequenceClassification(config).save_pretrained(folder)
    special = {"pad_piece": "<pad>", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "control_symbols": "[MASK]"}
    _write_sentencepiece(folder / "spiece.model", pad_id=0, unk_id=1, bos_id=2, eos_id=3, **special)
    # That of transformers 4 in Python drops a space at the end, which its pipelines' keeps.
    return transformers.AutoTokenizer.from_pretrained(folder, use_fast=True)


def _deberta_3(folder: Path) -> Any:
    config = transformers.DebertaV2Config(vocab_size=601, relative_attention=True, position_buckets=16, **SMALL)
    transformers.DebertaV2ForSequenceClassification(config).save_pretrained(folder)
    special = {"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"}
    _write_sentencepiece(folder / "spm.model", pad_id=0, bos_id=1, eos_id=2, unk_id=3, **special)
    return transformers.DebertaV2Tokenizer.from_pretrained(folder)


def _write_sentencepiece(path: Path, **options: Any) -> None:
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_LINES), model_writer=trained, vocab_size=600, minloglevel=2, **options
    )
    path.write_bytes(trained.getvalue())


# With transformers 4 the reference is the slow tokenizer, written in Python.
@pytest.mark.parametrize("make", [_bert, _roberta, _xlm_roberta, _camembert, _albert, _deberta_3])
def test_files_of_a_slow_tokenizer_give_the_same_ids_as_transformers(
    make: Callable[[Path], Any], compiled: Callable[..., Bundle], tmp_path: Path
) -> None:
    reference = make(tmp_path)

    tokenizer = JsonTokenizer(compiled(source=str(tmp_path)).tokenizer_json())

    for text in _TEXTS:
        assert tokenizer.encode(text).token_ids.tolist() == reference(text)["input_ids"]
        assert tokenizer.encode(text, "the pair").token_ids.tolist() == reference(text, "the pair")["input_ids"]


@pytest.mark.parametrize("make", [_bert, _roberta])
def test_special_tokens_in_texts_are_text_as_transformers_splits_them(
    make: Callable[[Path], Any], compiled: Callable[..., Bundle], tmp_path: Path
) -> None:
    make(tmp_path)
    # Not what `make` gives: that of transformers 4, written in Python, finds some special tokens all the same.
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, use_fast=True)
    text = "[CLS] and </s> and <mask> and [MASK]."

    tokenizer = JsonTokenizer(compiled(source=str(tmp_path)).tokenizer_json())

    assert tokenizer.encode(text).token_ids.tolist() == reference(text, split_special_tokens=True)["input_ids"]


def test_special_tokens_in_texts_are_text_to_sentencepiece(compiled: Callable[..., Bundle], tmp_path: Path) -> None:
    # Here transformers is wrong: its Unigram model finds its control tokens in texts, also with split_special_tokens.
    _xlm_roberta(tmp_path)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sentencepiece.bpe.model"))

    tokenizer = JsonTokenizer(compiled(source=str(tmp_path)).tokenizer_json())

    for text in ("a </s> b", "<s>", "<pad><unk></s>x", "<mask>", "The <mask> is </s>"):
        # fairseq's numbers: <s> 0, <pad> 1, </s> 2, <unk> 3, then the pieces of SentencePiece from its 3 on.
        expected = [piece + 1 if piece else 3 for piece in reference.encode(text)]
        assert tokenizer.encode(text).token_ids.tolist() == [0, *expected, 2], text


@pytest.mark.parametrize("make", [_roberta, _xlm_roberta])
def test_positions_before_the_first_token_are_not_counted_as_room_for_tokens(
    make: Callable[[Path], Any], compiled: Callable[..., Bundle], tmp_path: Path
) -> None:
    make(tmp_path)

    bundle = compiled(source=str(tmp_path), backend="openvino")

    assert bundle.spec.max_tokens == 512
    assert bundle.spec.inputs == ("input_ids", "attention_mask")
    assert _accuracy(bundle).sample_shapes[-1] == (1, 512)  # as long as the model takes, and it ran
    assert _accuracy(bundle).largest_difference < _SMALL_DIFFERENCE


def test_model_without_token_types_gets_none(compiled: Callable[..., Bundle], tmp_path: Path) -> None:
    config = transformers.DistilBertConfig(vocab_size=30522, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
    source = save(transformers.DistilBertForSequenceClassification(config), tmp_path / "distilbert")

    bundle = compiled(source=str(source), backend="openvino")

    assert bundle.spec.inputs == ("input_ids", "attention_mask")
    assert _accuracy(bundle).largest_difference < _SMALL_DIFFERENCE


def test_manifest_stores_how_far_the_artefact_is_from_pytorch(compiled: Callable[..., Bundle]) -> None:
    accuracy = _accuracy(compiled(backend="openvino"))

    assert 0 < accuracy.largest_difference < _SMALL_DIFFERENCE
    assert accuracy.samples == sum(batch for batch, _ in accuracy.sample_shapes)
    assert accuracy.sample_shapes[-1] == (1, 512)
    assert accuracy.computed_dtype == "float32"
    assert accuracy.emulated_difference is None


@pytest.mark.skipif(has_bfloat16(), reason="this CPU has bfloat16 and emulates nothing")
def test_bfloat16_on_a_cpu_without_it_is_judged_by_pytorch_in_bfloat16(compiled: Callable[..., Bundle]) -> None:
    accuracy = _accuracy(compiled(backend="openvino", dtype="bfloat16"))

    assert accuracy.computed_dtype == "float32"
    assert accuracy.largest_difference < _SMALL_DIFFERENCE
    # A bfloat16 has 8 significant bits: numbers around 10 are rounded by up to 2^-5, more than any rounding of float32.
    assert accuracy.emulated_difference is not None
    assert 1e-3 < accuracy.emulated_difference < 1


def test_manifest_names_the_versions_that_made_the_artefact(compiled: Callable[..., Bundle]) -> None:
    used = {"torch": torch.__version__, "transformers": transformers.__version__}
    assert compiled(backend="openvino").manifest.artifacts[0].versions == used | {"openvino": openvino.__version__}


def test_manifest_holds_the_digest_of_the_weights(compiled: Callable[..., Bundle], sources: dict[str, Path]) -> None:
    source = compiled().manifest.source

    weights = hashlib.sha256((sources["classifier"] / "model.safetensors").read_bytes()).hexdigest()
    assert source.weights_sha256 == hashlib.sha256(f"model.safetensors {weights}\n".encode()).hexdigest()
    assert source.location == str(sources["classifier"])


def test_artefact_beyond_the_allowed_divergence_leaves_nothing(compiled: Callable[..., Bundle], tmp_path: Path) -> None:
    with pytest.raises(
        SetupError, match=r"differs from PyTorch float32 by .* the limit is 1.00e-12 \(--max-divergence\)"
    ):
        compiled(backend="openvino", max_divergence=1e-12)
    assert list((tmp_path / "repository").rglob("*")) == []


class _BrokenCompiler:
    """Writes half of an artefact and fails."""

    DTYPES = ("float32",)
    BUCKETS = "optional"

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def convert(self, conversion: Conversion) -> None:
        (conversion.folder / "artifacts").mkdir()
        (conversion.folder / "artifacts" / "half").write_bytes(b"half")
        raise self._error


def _run_compile(source: Path, repository: Path, *arguments: str) -> None:
    options = f"--task text-classification --repository {repository} --backend fake".split()
    cli.main(["compile", str(source), *options, *arguments])


@pytest.mark.parametrize(("arguments", "name"), [((), "classifier"), (("--name", "mine"), "mine")], ids=str)
def test_command_names_the_model_as_asked_or_else_as_its_source(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], name: str
) -> None:
    _run_compile(sources["classifier"], tmp_path, *arguments)
    assert capsys.readouterr().out == f"{tmp_path}/{name}/1\n"


def test_command_compiles_what_is_missing_only_if_it_is_told_so(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        _run_compile(sources["classifier"], tmp_path, "--if-missing")
    _run_compile(sources["classifier"], tmp_path)
    _run_compile(tmp_path / "not even looked at", tmp_path, "--name", "classifier", "--if-missing")
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path}/classifier/{version}" for version in (1, 1, 2, 2)]


def test_command_that_is_terminated_leaves_the_repository_as_it_was(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminated(_BrokenCompiler):
        def convert(self, conversion: Conversion) -> None:
            assert len(list(tmp_path.glob("classifier/.1.*"))) == 1
            signal.raise_signal(signal.SIGTERM)
            super().convert(conversion)

    monkeypatch.setitem(compiler.COMPILERS, "terminated", Terminated(RuntimeError("SIGTERM was ignored")))
    # Where the command does not handle the signal, it must not end the tests.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as ended:
            _run_compile(sources["classifier"], tmp_path, "--backend", "terminated")
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)

    assert ended.value.code == 143  # 128 plus the number of SIGTERM, 15
    assert list(tmp_path.iterdir()) == []


def test_bundle_holds_its_buckets_and_takes_no_more_tokens_than_the_longest(compiled: Callable[..., Bundle]) -> None:
    bundle = compiled(buckets=BucketRequest(("8x64", "1x32")))
    assert [str(bucket) for bucket in bundle.manifest.artifacts[0].buckets] == ["8x64", "1x32"]
    assert (bundle.spec.max_tokens, bundle.spec.largest_bucket) == (64, "8x64")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "speech"}, "task 'speech' is not known; there are: text_classification"),
        ({"backend": "tpu"}, "back end 'tpu' is not known; there are: openvino"),
        ({"buckets": BucketRequest(("8x0",))}, "--bucket '8x0': must be BATCHxTOKENS"),
        ({"buckets": BucketRequest(("8x513",))}, "--bucket 8x513: 513 tokens, the model takes 512"),
        ({"buckets": BucketRequest(("8x2",))}, "--bucket 8x2: the longest takes 2 tokens, the least is 3"),
        ({"buckets": BucketRequest(("auto",))}, "--buckets auto needs the lengths of real inputs: --lengths FILE"),
        ({"buckets": BucketRequest(("4x2", "8x1"))}, "--bucket 4x2: the longest takes 2 tokens, the least is 3"),
        ({"buckets": BucketRequest(("8x128",), Path("x"))}, "--lengths: for --buckets auto only"),
        (
            {"buckets": BucketRequest((), Path("x"), 4, (1,))},
            "--lengths, --max-lengths, --batches: for --buckets auto only",
        ),
        ({"backend": "openvino", "buckets": BucketRequest((), Path("x"))}, "--lengths: for --buckets auto only"),
        ({"neuronx": NeuronxOptions(optlevel=3)}, "--optlevel, .* are for --backend neuronx"),
        (
            {"buckets": BucketRequest(("8x128",)), "backend": "openvino"},
            "openvino computes any shape; leave out --bucket",
        ),
        ({"dtype": "float8"}, "dtype 'float8' is not known for fake; there are: float32"),
        ({"name": "../up"}, "name '../up' cannot be a folder's name"),
        ({"name": ""}, "choose one with --name"),
        ({"name": "m" * 256}, "cannot be written to: File name too long"),
        ({"repository": Path(__file__)}, "cannot be written to: Not a directory"),
        ({"version": 0}, "version 0: versions are whole numbers from 1 on"),
        ({"source": ""}, "SOURCE: is empty"),
        ({"source": "/no/such/folder"}, "/no/such/folder: no such folder"),
        ({"source": "./models/mine"}, "./models/mine: no such folder"),
        ({"source": "no spaces/allowed"}, "neither a local folder nor a model on the Hub"),
    ],
    ids=str,
)
def test_senseless_request_is_refused(changes: dict[str, Any], message: str, compiled: Callable[..., Bundle]) -> None:
    with pytest.raises(SetupError, match=message):
        compiled(**changes)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ConvBert", "the outputs of ConvBertForTokenClassification for a text change by .* beside a longer one"),
        ("Nystromformer", "because it reads padding as text"),
        ("FNet", "FNetForTokenClassification takes no attention_mask"),
    ],
)
def test_model_whose_answers_depend_on_the_padding_of_their_batch_is_refused(
    kind: str, message: str, compiled: Callable[..., Bundle], tmp_path: Path
) -> None:
    tokenizer = word_piece(max_tokens=64)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer), embedding_size=32, max_position_embeddings=64, **SMALL
    )
    save(getattr(transformers, f"{kind}ForTokenClassification")(config), tmp_path / "source", tokenizer)
    with pytest.raises(SetupError, match=message):
        compiled(source=str(tmp_path / "source"), task="token_classification")


def test_model_whose_tokenizer_has_no_padding_is_padded_by_any_token(
    sources: dict[str, Path], compiled: Callable[..., Bundle], tmp_path: Path
) -> None:
    source = shutil.copytree(sources["classifier"], tmp_path / "source")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": None}))
    assert compiled(source=str(source)).manifest.model.pad_token_id == 0


def test_model_gets_a_mask_of_its_padding_whatever_its_tokenizer_names(
    sources: dict[str, Path], compiled: Callable[..., Bundle], tmp_path: Path
) -> None:
    source = shutil.copytree(sources["classifier"], tmp_path / "source")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "model_input_names": ["input_ids"]}))
    assert compiled(source=str(source)).manifest.model.inputs == ("input_ids", "attention_mask")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hub that refuses every request, with the repository's name as its error code."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", self.path.split("/")[4])  # /api/models/OWNER/NAME/revision/…
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()
        serving.join()


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("RepoNotFound", "owner/RepoNotFound: neither a local folder nor a model on the Hub"),
        ("RevisionNotFound", "owner/RevisionNotFound: on the Hub, but without a revision 'v9'"),
        ("GatedRepo", "owner/GatedRepo: the Hub gives it to accounts with access only; log in"),
    ],
)
def test_refusal_of_the_hub_is_told_with_what_to_do(name: str, message: str, compiled: Callable[..., Bundle]) -> None:
    with pytest.raises(SetupError, match=message):
        compiled(source=f"owner/{name}", revision="v9")


@pytest.mark.parametrize("source", ["owner/name", "a-folder-that-is-not-there"])
def test_hub_that_cannot_be_reached_is_told_with_the_folder_that_is_missing(
    source: str, compiled: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing listens on port 9 (discard).
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        SetupError,
        match=f"{source}: no local folder, and the Hub cannot be reached .*; where it can, run: hf download {source} "
        "--local-dir DIR",
    ):
        compiled(source=source)


def test_openvino_sends_no_telemetry(tmp_path: Path) -> None:
    # Before OpenVINO sends anything it writes an id of the user to ~/intel.
    assert importlib.metadata.version("openvino-telemetry")
    program = "import neuronpipe.compiler, neuronpipe.stages.neuron_executor.backends.openvino"
    subprocess.run([sys.executable, "-c", program], check=True, env={"HOME": str(tmp_path)}, timeout=120)
    assert list(tmp_path.iterdir()) == []


def _accuracy(bundle: Bundle) -> Accuracy:
    accuracy = bundle.manifest.artifacts[0].accuracy
    assert accuracy is not None
    return accuracy
