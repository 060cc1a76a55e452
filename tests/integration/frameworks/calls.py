"""Calls the HTTP door with the clients of a framework, and prints as JSON what they read out of its answers.

Run in .venv-frameworks: calls.py {langchain,llama_index,haystack,tei_client,sagemaker} URL
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


def langchain(url: str) -> dict[str, Any]:
    """LangChain's embeddings: OpenAI's, and Hugging Face's."""
    from huggingface_hub import InferenceClient
    from langchain_huggingface import HuggingFaceEndpointEmbeddings
    from langchain_openai import OpenAIEmbeddings

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
    return {**found, "endpoint": endpoint.embed_documents(TEXTS)}


def llama_index(url: str) -> dict[str, Any]:
    """LlamaIndex's embeddings by OpenAI's protocol and by TEI's, and TEI's rerank."""
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
    from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

    openai = OpenAILikeEmbedding(model_name="minilm", api_base=f"{url}/v1", api_key="none", max_retries=0)
    tei = TextEmbeddingsInference(model_name="minilm", base_url=url)
    reranker = TextEmbeddingInference(base_url=url, model_name="reranker", top_n=1)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in DOCUMENTS]
    [best] = reranker.postprocess_nodes(nodes, query_bundle=QueryBundle(QUERY))
    return {
        "openai": openai.get_text_embedding_batch(TEXTS),
        "openai query": openai.get_query_embedding(TEXTS[0]),
        "tei": tei.get_text_embedding_batch(TEXTS),
        "tei query": tei.get_query_embedding(TEXTS[0]),
        "async tei": asyncio.run(tei.aget_text_embedding_batch(TEXTS)),
        "rerank": [best.node.get_content(), best.score],
    }


def haystack(url: str) -> dict[str, Any]:
    """haystack's components for TEI, and for OpenAI's protocol."""
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
    from haystack.utils import Secret
    from haystack_integrations.components.embedders.huggingface_api import (
        HuggingFaceAPIDocumentEmbedder,
        HuggingFaceAPITextEmbedder,
    )
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
    return {
        "openai query": OpenAITextEmbedder(**openai).run(TEXTS[0])["embedding"],
        "openai": [document.embedding for document in embedded],
        "tei query": query.run(TEXTS[0])["embedding"],
        "tei query as by default": raw.run(TEXTS[0])["embedding"],
        "tei": [document.embedding for document in embedder.run(documents)["documents"]],
        "rerank": [best.content, best.score],
    }


def tei_client(url: str) -> dict[str, Any]:
    """A client of TEI's API, whose models check each field of an answer."""
    from tei_client import HttpClient

    embedder, classifier, reranker = (
        HttpClient(url, params={"model": model}) for model in ("minilm", "classifier", "reranker")
    )
    [tokens] = embedder.tokenize(TEXTS[0])
    return {
        "healthy": embedder.health(),
        "kinds": [one.info().server_model_type.value for one in (embedder, classifier, reranker)],
        "embed": embedder.embed(TEXTS),
        "decode": embedder.decode([tokens.get_ids()]),
        "classify": [[[one.label, one.score] for one in labels.scores] for labels in classifier.classify(TEXTS)],
        "rerank": [[one.index, one.score] for one in reranker.rerank(QUERY, DOCUMENTS).ranks],
    }


def sagemaker(url: str) -> dict[str, Any]:
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
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
