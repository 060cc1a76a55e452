"""openvino-genai's continuous batching, in this process, on the graph of our bundle with logits of all tokens."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from tests.bench.peers.generating import Prompts, answer_orders

_CACHE_GB = 1


def main() -> None:
    """Answers orders for the model of a folder of `tests.bench.generation_models`, by its name."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory(prefix="openvino-genai-") as scratch:
        bundle = folder / "repository" / name / "1"
        graph = _whole_graph(bundle / "artifacts/openvino/model.xml")
        openvino.save_model(graph, Path(scratch) / "openvino_model.xml", compress_to_fp16=False)
        for file in ("config.json", "generation_config.json"):
            shutil.copy(folder / "sources" / name / file, scratch)
        settings = openvino_genai.SchedulerConfig()
        settings.cache_size = _CACHE_GB
        # Those of our bundle.
        precision = json.loads((bundle / "manifest.json").read_text())["artifacts"][0]["properties"]
        pipeline = openvino_genai.ContinuousBatchingPipeline(
            scratch, openvino_genai.Tokenizer(scratch), settings, "CPU", **precision
        )

        def generate(prompts: Prompts, new_tokens: int) -> Prompts:
            options = openvino_genai.GenerationConfig(
                max_new_tokens=new_tokens, eos_token_id=0, ignore_eos=True, do_sample=False
            )
            inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
            made = pipeline.generate(inputs, [options] * len(inputs))
            return [text.m_generation_ids[0] for text in made]

        answer_orders(generate)


def _whole_graph(file: Path) -> openvino.Model:
    """Ours computes logits of chosen rows; openvino-genai's transformation chooses them itself."""
    graph = openvino.Core().read_model(file)
    rows = graph.input("scored_rows")
    (choice,) = (port.get_node() for port in rows.get_target_inputs())
    last = graph.output("logits").get_node().input_value(0).get_node()
    for node in (choice, last):
        for port in node.output(0).get_target_inputs():
            port.replace_source_output(node.input_value(0))
    graph.remove_parameter(rows.get_node())
    graph.validate_nodes_and_infer_types()
    return graph


if __name__ == "__main__":
    main()
