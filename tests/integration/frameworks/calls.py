"""Calls the HTTP door with the clients of a framework, and prints as JSON what they read out of its answers.

Run in .venv-frameworks: calls.py FRAMEWORK URL WRITER_URL. FRAMEWORK is the name of one of the functions here.
"""

import asyncio
import json
import sys
from typing import Any

TEXTS = ["A fine day.", "Ann lives in a house in Paris."]
QUERY = "Who sat?"
DOCUMENTS = ["A dog ran.", "The cat sat."]
# More than one InferBatch takes, and fewer than the clients send at once by default.
MANY = [f"Document {number}." for number in range(300)]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a module?"}]
MAX_TOKENS = 12
# Enough for what has a form.
_FORM_TOKENS = 120
_SIZE = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {
    "title": "thing",
    "description": "A thing.",
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": _SIZE},
    "required": ["name", "size"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "thing", "description": "A thing.", "parameters": SCHEMA}}


def litellm(url: str, writer: str) -> dict[str, Any]:
    """LiteLLM, by OpenAI's protocol, vLLM's names and Cohere's rerank."""
    import litellm as client

    options: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none"}
    asked: dict[str, Any] = {"model": "openai/writer", "messages": CHAT, "max_tokens": MAX_TOKENS}
    asked |= {"api_base": f"{writer}/v1", "api_key": "none"}
    formed = asked | {"max_tokens": _FORM_TOKENS, "seed": 6}
    chunks = [*client.completion(**asked, stream=True, stream_options={"include_usage": True})]
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    [call] = client.completion(**formed, tools=[_TOOL], tool_choice="required").choices[0].message.tool_calls[:1]
    ranked = {"query": QUERY, "documents": DOCUMENTS, "top_n": 1, "api_key": "none"}
    return {
        "embeddings": [entry["embedding"] for entry in client.embedding("openai/minilm", TEXTS, **options).data],
        "vllm's embeddings": [
            entry["embedding"] for entry in client.embedding("hosted_vllm/minilm", TEXTS, **options).data
        ],
        "chat": client.completion(**asked).choices[0].message.content,
        "vllm's chat": client.completion(**asked | {"model": "hosted_vllm/writer"}).choices[0].message.content,
        "async chat": asyncio.run(client.acompletion(**asked)).choices[0].message.content,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "usage": chunks[-1].usage.completion_tokens,
        "form": client.completion(**formed, response_format=form).choices[0].message.content,
        "call": [call.function.name, call.function.arguments],
        "response": client.responses(
            CHAT[1]["content"],
            "openai/writer",
            instructions="Be brief.",
            max_output_tokens=MAX_TOKENS,
            api_base=f"{writer}/v1",
            api_key="none",
        )
        .output[0]
        .content[0]
        .text,
        "rerank": [
            [result["index"], result["relevance_score"]]
            for model, base in (("cohere", url), ("hosted_vllm", f"{url}/v1"), ("hosted_vllm", url), ("jina_ai", url))
            for result in client.rerank(f"{model}/reranker", **ranked, api_base=base).results
        ],
    }


def langchain(url: str, writer: str) -> dict[str, Any]:
    """LangChain's embeddings and chats: OpenAI's, and Hugging Face's."""
    from huggingface_hub import InferenceClient
    from langchain_huggingface import HuggingFaceEndpointEmbeddings
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    def chat(**options: Any) -> Any:
        return ChatOpenAI(model="writer", base_url=f"{writer}/v1", api_key="none", max_retries=0, **options)

    short, long = chat(max_tokens=MAX_TOKENS), chat(max_tokens=_FORM_TOKENS, seed=6)
    said = {
        "chat": short.invoke(CHAT).content,
        "async chat": asyncio.run(short.ainvoke(CHAT)).content,
        "stream": "".join(chunk.content for chunk in short.stream(CHAT)),
        "form": long.with_structured_output(SCHEMA).invoke(CHAT),
        "tool's form": long.with_structured_output(SCHEMA, method="function_calling").invoke(CHAT),
    }

    openai = OpenAIEmbeddings(
        model="minilm", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0
    )
    short = OpenAIEmbeddings(
        model="minilm", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False, dimensions=7
    )
    found = {
        "documents": openai.embed_documents(TEXTS),
        "query": openai.embed_query(TEXTS[0]),
        "async documents": asyncio.run(openai.aembed_documents(TEXTS)),
        "dimensions": short.embed_query(TEXTS[0]),
        "many": openai.embed_documents(MANY)[::60],
    }
    try:
        HuggingFaceEndpointEmbeddings(model=f"{url}/models/minilm")
    except ValueError as error:
        found["url as model"] = str(error)
    endpoint = HuggingFaceEndpointEmbeddings(model="minilm", huggingfacehub_api_token="none")
    endpoint.client = InferenceClient(f"{url}/models/minilm")
    return {**said, **found, "endpoint": endpoint.embed_documents(TEXTS)}


def llama_index(url: str, writer: str) -> dict[str, Any]:
    """LlamaIndex's embeddings and chats by OpenAI's protocol, and TEI's embeddings and rerank."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
    from llama_index.llms.openai_like import OpenAILike
    from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

    openai = OpenAILikeEmbedding(model_name="minilm", api_base=f"{url}/v1", api_key="none", max_retries=0)
    tei = TextEmbeddingsInference(model_name="minilm", base_url=url)
    reranker = TextEmbeddingInference(base_url=url, model_name="reranker", top_n=1)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in DOCUMENTS]
    [best] = reranker.postprocess_nodes(nodes, query_bundle=QueryBundle(QUERY))
    chat = OpenAILike(
        model="writer",
        api_base=f"{writer}/v1",
        api_key="none",
        is_chat_model=True,
        temperature=0,
        max_tokens=MAX_TOKENS,
        max_retries=0,
    )
    messages = [ChatMessage(**message) for message in CHAT]
    return {
        "chat": chat.chat(messages).message.content,
        "stream": "".join(chunk.delta or "" for chunk in chat.stream_chat(messages)),
        "openai": openai.get_text_embedding_batch(TEXTS),
        "openai query": openai.get_query_embedding(TEXTS[0]),
        "tei": tei.get_text_embedding_batch(TEXTS),
        "tei query": tei.get_query_embedding(TEXTS[0]),
        "async tei": asyncio.run(tei.aget_text_embedding_batch(TEXTS)),
        "rerank": [best.node.get_content(), best.score],
    }


def haystack(url: str, writer: str) -> dict[str, Any]:
    """haystack's components for TEI, and for OpenAI's protocol."""
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret
    from haystack_integrations.components.embedders.huggingface_api import (
        HuggingFaceAPIDocumentEmbedder,
        HuggingFaceAPITextEmbedder,
    )
    from haystack_integrations.components.generators.huggingface_api import HuggingFaceAPIChatGenerator
    from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

    documents = [Document(content=text) for text in TEXTS]
    openai = {"api_key": Secret.from_token("none"), "model": "minilm", "api_base_url": f"{url}/v1", "max_retries": 0}
    tei: dict[str, Any] = {"api_type": "text_embeddings_inference", "token": None}
    query = HuggingFaceAPITextEmbedder(**tei, api_params={"url": url}, normalize=True)
    raw = HuggingFaceAPITextEmbedder(**tei, api_params={"url": f"{url}/models/minilm"})
    embedder = HuggingFaceAPIDocumentEmbedder(**tei, api_params={"url": url}, normalize=True, progress_bar=False)
    ranker = HuggingFaceTEIRanker(url=url, top_k=1, token=None)
    [best] = ranker.run(query=QUERY, documents=[Document(content=text) for text in DOCUMENTS])["documents"]
    embedded = OpenAIDocumentEmbedder(**openai, progress_bar=False).run(documents)["documents"]
    chat = OpenAIChatGenerator(**openai | {"model": "writer", "api_base_url": f"{writer}/v1"})
    messages = [ChatMessage.from_system(CHAT[0]["content"]), ChatMessage.from_user(CHAT[1]["content"])]
    short, long = {"max_tokens": MAX_TOKENS}, {"max_tokens": _FORM_TOKENS, "seed": 6}
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    tool = Tool(name="thing", description="A thing.", parameters=SCHEMA, function=dict)
    tgi = HuggingFaceAPIChatGenerator(api_type="text_generation_inference", api_params={"url": writer}, token=None)
    streamed: list[str] = []
    chat.run(messages, generation_kwargs=short, streaming_callback=lambda chunk: streamed.append(chunk.content))
    called = chat.run(messages, generation_kwargs=long | {"tool_choice": "required"}, tools=[tool])["replies"][0]
    return {
        "chat": chat.run(messages, generation_kwargs=short)["replies"][0].text,
        "stream": "".join(streamed),
        "tgi chat": tgi.run(messages, generation_kwargs=short)["replies"][0].text,
        "form": chat.run(messages, generation_kwargs=long | {"response_format": form})["replies"][0].text,
        "call": [called.tool_calls[0].tool_name, called.tool_calls[0].arguments],
        "openai query": OpenAITextEmbedder(**openai).run(TEXTS[0])["embedding"],
        "openai": [document.embedding for document in embedded],
        "tei query": query.run(TEXTS[0])["embedding"],
        "tei query as by default": raw.run(TEXTS[0])["embedding"],
        "tei": [document.embedding for document in embedder.run(documents)["documents"]],
        "rerank": [best.content, best.score],
    }


def tei_client(url: str, writer: str) -> dict[str, Any]:
    """A client of TEI's API, whose models check each field of an answer."""
    from tei_client import HttpClient

    embedder, classifier, reranker = (
        HttpClient(url, params={"model": model}) for model in ("minilm", "classifier", "reranker")
    )
    [tokens] = embedder.tokenize(TEXTS[0])
    return {
        "healthy": embedder.health(),
        "kinds": [client.info().server_model_type.value for client in (embedder, classifier, reranker)],
        "embed": embedder.embed(TEXTS),
        "decode": embedder.decode([tokens.get_ids()]),
        "classify": [[[score.label, score.score] for score in labels.scores] for labels in classifier.classify(TEXTS)],
        "rerank": [[rank.index, rank.score] for rank in reranker.rerank(QUERY, DOCUMENTS).ranks],
    }


def anthropic(url: str, writer: str) -> dict[str, Any]:
    """Anthropic's own client."""
    import anthropic as client

    anthropic = client.Anthropic(base_url=writer, api_key=None, auth_token="none", max_retries=0)
    messages = anthropic.messages
    asked: dict[str, Any] = {"model": "writer", "system": CHAT[0]["content"], "messages": CHAT[1:]}
    with messages.stream(**asked, max_tokens=MAX_TOKENS) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    tool = {"name": "thing", "description": "A thing.", "input_schema": SCHEMA}
    forced = messages.create(
        **asked, max_tokens=_FORM_TOKENS, tools=[tool], tool_choice={"type": "tool", "name": "thing"}
    )
    try:
        messages.create(**asked | {"model": "unknown"}, max_tokens=1)
    except client.NotFoundError as error:
        refused = error.body["error"]["type"]
    whole = messages.create(**asked, max_tokens=MAX_TOKENS)
    stop = whole.content[0].text[4:7]
    stopped = messages.create(**asked, max_tokens=MAX_TOKENS, stop_sequences=[stop])
    config = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    formed = messages.create(**asked, max_tokens=_FORM_TOKENS, output_config=config)
    runner = anthropic.beta.messages.tool_runner(**asked, max_tokens=MAX_TOKENS, tools=[])
    try:
        runner.until_done()
    except client.BadRequestError as error:
        threads = error.body["error"]["message"]
    alone = anthropic.beta.messages.tool_runner(**asked, max_tokens=MAX_TOKENS, tools=[], thread=False).until_done()
    long = messages.count_tokens(**asked | {"messages": [{"role": "user", "content": "module " * 500}]})
    return {
        "whole": whole.content[0].text,
        "stream": streamed,
        "ends": [whole.stop_reason, final.stop_reason, final.usage.output_tokens],
        "tokens": [whole.usage.input_tokens, messages.count_tokens(**asked).input_tokens, long.input_tokens],
        "form": forced.content[0].input,
        "output form": json.loads(formed.content[0].text),
        "stop": [stop, stopped.stop_sequence, stopped.stop_reason],
        "refused": refused,
        "thread": threads,
        "alone": alone.content[0].text,
        "id": [whole.id, whole._request_id],
        "models": [[model.id, model.display_name, model.created_at.timestamp()] for model in anthropic.models.list()],
    }


def voyage(url: str, writer: str) -> dict[str, Any]:
    """Voyage's own client."""
    import voyageai

    client = voyageai.Client(api_key="none", base_url=f"{url}/v1")
    ranked = client.rerank(QUERY, DOCUMENTS, "reranker", top_k=1)
    try:
        client.embed(TEXTS, "nobody")
    except voyageai.error.VoyageError as error:  # it reads only errors of Voyage's form, and shows others whole
        refused = str(error)
    return {
        "embed": client.embed(TEXTS, "minilm").embeddings,
        "query": client.embed(TEXTS, "minilm", input_type="query").embeddings,
        "binary": client.embed(TEXTS, "minilm", output_dtype="binary", output_dimension=16).embeddings,
        "tokens": client.embed(TEXTS, "minilm").total_tokens,
        "rerank": [[result.index, result.document, result.relevance_score] for result in ranked.results],
        "all": len(client.rerank(QUERY, DOCUMENTS, "reranker").results),
        "refused": refused,
    }


def sagemaker(url: str, writer: str) -> dict[str, Any]:
    """AWS's client of SageMaker's runtime."""
    import boto3
    from botocore.exceptions import ClientError

    runtime = boto3.client(
        "sagemaker-runtime",
        endpoint_url=url,
        region_name="eu-central-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",
    )

    def invoke(media_type: str, body: str, **options: str) -> str:
        answer = runtime.invoke_endpoint(EndpointName="classifier", ContentType=media_type, Body=body, **options)
        return str(answer["Body"].read().decode())

    lines = "".join(json.dumps({"inputs": text}) + "\n" for text in TEXTS)
    try:
        invoke("application/json", json.dumps({"inputs": ""}))
    except ClientError as error:
        refused = error.response["ResponseMetadata"]["HTTPStatusCode"]
    try:
        runtime.invoke_endpoint_with_response_stream(EndpointName="classifier", Body="{}")
    except ClientError as error:
        stream = error.response["ResponseMetadata"]["HTTPStatusCode"]
    try:
        runtime.invoke_endpoint_async(EndpointName="classifier", InputLocation="s3://bucket/inputs.json")
    except ClientError as error:
        later = error.response["ResponseMetadata"]["HTTPStatusCode"]
    return {
        "json": json.loads(invoke("application/json", json.dumps({"inputs": TEXTS[0]}))),
        "csv": json.loads(invoke("text/csv", "inputs\n" + "\n".join(TEXTS))),
        "lines": list(map(json.loads, invoke("application/jsonlines", lines).splitlines())),
        "target model": json.loads(invoke("application/json", json.dumps({"inputs": TEXTS[0]}), TargetModel="minilm")),
        "refused": refused,
        "stream": stream,
        "async": later,
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
