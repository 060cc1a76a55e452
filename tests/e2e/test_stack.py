"""The stack as it comes up: it answers as every other gateway does, and its containers hold no more than they need."""

import json
import subprocess
import sys
import urllib.error
import urllib.request

import openai
import pytest

from tests.e2e.stack import PROJECT, ROOT, SERVICES, Stack, wait_until

_MEGABYTE = 10**6
# Over the base image.
_MOST_MEGABYTES = {"gateway": 250, "tokenizer": 250, "postprocessor": 250, "neuron-executor": 600}
_HEAVY = ("torch", "transformers", "nncf", "scipy", "pip", "setuptools")


def test_the_behaviour_suite_passes(stack: Stack) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/integration",
        f"--target={stack.target}",
        "-q",
        "--timeout",
        "300",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_the_command_line_gets_an_answer(stack: Stack) -> None:
    request = json.dumps({"text_classification": {"text": "A fine day."}})
    command = [
        sys.executable,
        "-m",
        "neuronpipe",
        "infer",
        "--target",
        stack.target,
        "--model",
        "classifier",
        "--json",
        request,
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["model"] == "classifier"


def test_the_client_of_openai_gets_vectors(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.url('gateway_http')}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="minilm", input=["A fine day.", "Lovely weather."])
    assert [entry.index for entry in answer.data] == [0, 1]


def test_a_page_of_another_site_gets_nothing_over_http(stack: Stack) -> None:
    request = urllib.request.Request(f"{stack.url('gateway_http')}/v1/models", headers={"host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request)


# The postprocessor makes text of generated tokens.
_OWN = {"tokenizer": "tokenizers", "postprocessor": "tokenizers", "neuron-executor": "openvino"}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_runs_without_rights_on_a_file_system_that_it_cannot_write(stack: Stack, service: str) -> None:
    [container] = stack.containers(service)
    program = """
import os
refused = []
for folder in ("/", "/opt/neuronpipe", "/repository", "/home"):
    try:
        open(folder + "/probe", "w")
    except OSError:
        refused.append(folder)
rights = [line.split()[1] for line in open("/proc/1/status") if line.startswith(("CapEff", "NoNewPrivs"))]
print(os.getuid(), rights, refused)
"""
    assert (
        stack.python(container, program).strip()
        == "65532 ['0000000000000000', '1'] ['/', '/opt/neuronpipe', '/repository', '/home']"
    )


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_holds_neither_compilers_nor_what_other_services_need(stack: Stack, service: str) -> None:
    foreign = {*_HEAVY, "tokenizers", "openvino"} - {_OWN.get(service, "")}
    program = f"""
import importlib.util, shutil
modules = [name for name in {sorted(foreign)} if importlib.util.find_spec(name)]
print(modules, [tool for tool in ("cc", "gcc", "make") if shutil.which(tool)])
"""
    [container] = stack.containers(service)
    assert stack.python(container, program).strip() == "[] []"


@pytest.mark.parametrize("service", SERVICES)
def test_the_bill_of_an_image_names_the_packages_that_it_holds(stack: Stack, service: str) -> None:
    program = """
import importlib.metadata, json, re
bill = json.load(open("/usr/share/sbom/neuronpipe.cdx.json"))
held = {(re.sub("[-_.]+", "-", one.name).lower(), one.version) for one in importlib.metadata.distributions()}
print(sorted(held ^ {(one["name"], one["version"]) for one in bill["components"]}))
"""
    [container] = stack.containers(service)
    assert stack.python(container, program).strip() == "[]"


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_is_small(stack: Stack, service: str) -> None:
    sizes = [
        int(stack.docker("image", "inspect", "-f", "{{.Size}}", image))
        for image in (stack.image(service), stack.environment["PYTHON_IMAGE"])
    ]
    assert sizes[0] - sizes[1] <= _MOST_MEGABYTES[service] * _MEGABYTE


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_says_what_it_is(stack: Stack, service: str) -> None:
    labels = json.loads(stack.docker("image", "inspect", "-f", "{{json .Config.Labels}}", stack.image(service)))
    assert labels["org.opencontainers.image.title"] == f"neuronpipe {service}"
    assert labels["org.opencontainers.image.version"] == stack.environment["VERSION"]
    assert len(labels["org.opencontainers.image.revision"]) == 40


def test_only_the_gateway_and_pages_are_published_and_on_loopback_only(stack: Stack) -> None:
    names = stack.docker(
        "ps",
        "--filter",
        f"label=com.docker.compose.project={PROJECT}",
        "--format",
        '{{.Label "com.docker.compose.service"}} {{.Ports}}',
    )
    published = dict(line.split(" ", 1) for line in names.splitlines() if "->" in line)
    assert published.keys() == {"gateway", "jaeger", "prometheus"}
    assert all(
        part.startswith("127.0.0.1:") for ports in published.values() for part in ports.split(", ") if "->" in part
    )


def test_prometheus_reads_the_metrics_of_every_service(stack: Stack) -> None:
    def all_up() -> bool:
        with urllib.request.urlopen(f"{stack.url('prometheus')}/api/v1/query?query=up") as response:
            series = json.load(response)["data"]["result"]
        return {sample["metric"]["job"] for sample in series if sample["value"][1] == "1"} == set(SERVICES)

    wait_until("all services are scraped", all_up)
    with urllib.request.urlopen(f"{stack.url('prometheus')}/api/v1/rules") as response:
        rules = [rule for group in json.load(response)["data"]["groups"] for rule in group["rules"]]
    assert rules
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}


def test_the_compile_step_does_nothing_where_the_model_is_there(stack: Stack) -> None:
    stack.compose("up", "--no-deps", "--exit-code-from", "compile", "compile")
    [container] = stack.containers("compile", all=True)
    assert (
        stack.docker("logs", "--tail", "1", container.id).strip() == f"/repository/{stack.environment['MODEL_NAME']}/1"
    )
