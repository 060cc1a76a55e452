"""docs/alerts.yaml: when an alert fires and when it does not, as Prometheus itself evaluates it."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

_RULES = Path(__file__).parents[2] / "docs" / "alerts.yaml"
_TOKENIZER = 'job="tokenizer", instance="t:9464"'
_GATEWAY = 'job="gateway", instance="g:9464"'
_OTHER = 'job="gateway", instance="h:9464"'

# Alerts without a case here. A new alert has a case.
_WITHOUT_CASE = {
    "NeuronpipeLatency",
    "NeuronpipeNoTraffic",
    "NeuronpipeErrors",
    "NeuronpipeSaturated",
    "NeuronpipeCoreLost",
    "NeuronpipeNeuronErrors",
    "NeuronpipeSheddingLoad",
    "NeuronpipeSpansLost",
}


def _check(tmp_path: Path, alert: str, series: dict[str, str], expected: list[dict[str, str]]) -> None:
    """Ten minutes of series, a value a minute in promtool's notation, end with these alerts, by their labels."""
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool, of Prometheus, is not installed; `make setup` installs it")
    case: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [],
        "alert_rule_test": [
            {"alertname": alert, "eval_time": "10m", "exp_alerts": [{"exp_labels": labels} for labels in expected]}
        ],
    }
    # Annotations are compared, too, where an alert is expected.
    [rule] = [
        rule
        for group in yaml.safe_load(_RULES.read_text())["groups"]
        for rule in group["rules"]
        if rule["alert"] == alert
    ]
    for fired, labels in zip(case["alert_rule_test"][0]["exp_alerts"], expected, strict=True):
        texts: dict[str, str] = dict(rule["annotations"])
        for label, value in labels.items():
            texts = {name: text.replace(f"{{{{ $labels.{label} }}}}", value) for name, text in texts.items()}
        fired["exp_annotations"] = texts
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(_RULES)], "evaluation_interval": "1m", "tests": [case]}))
    result = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_replica_that_gets_no_requests_does_not_say_that_redis_is_away(tmp_path: Path) -> None:
    series = {
        f'neuronpipe_cache_redis_available{{{_TOKENIZER}, neuronpipe_cache="tokens"}}': "0x10",
        f"neuronpipe_item_duration_seconds_count{{{_TOKENIZER}}}": "7x10",
        # Another replica is busy, and its Redis answers.
        'neuronpipe_cache_redis_available{job="tokenizer", instance="u:9464", neuronpipe_cache="tokens"}': "1x10",
        'neuronpipe_item_duration_seconds_count{job="tokenizer", instance="u:9464"}': "0+60x10",
    }
    _check(tmp_path, "NeuronpipeRedisUnavailable", series, [])


def test_a_replica_that_was_never_asked_anything_has_no_counter_and_does_not_fire(tmp_path: Path) -> None:
    series = {f'neuronpipe_cache_redis_available{{{_TOKENIZER}, neuronpipe_cache="tokens"}}': "0x10"}
    _check(tmp_path, "NeuronpipeRedisUnavailable", series, [])


@pytest.mark.parametrize(
    ("where", "cache", "counter"),
    [
        (_TOKENIZER, "tokens", "neuronpipe_item_duration_seconds_count"),
        (_GATEWAY, "results", "neuronpipe_request_duration_seconds_count"),
    ],
)
def test_redis_that_is_away_while_requests_come_fires(tmp_path: Path, where: str, cache: str, counter: str) -> None:
    series = {
        f'neuronpipe_cache_redis_available{{{where}, neuronpipe_cache="{cache}"}}': "0x10",
        f"{counter}{{{where}}}": "0+60x10",
    }
    labels = {"severity": "info", "job": where.split('"')[1], "neuronpipe_cache": cache}
    _check(tmp_path, "NeuronpipeRedisUnavailable", series, [labels])


@pytest.mark.parametrize(("days", "fires"), [(6, True), (8, False)])
def test_a_certificate_that_ends_within_a_week_fires(tmp_path: Path, days: int, fires: bool) -> None:
    where = f'{_GATEWAY}, neuronpipe_tls_side="server"'
    series = {f"neuronpipe_tls_certificate_expiry_seconds{{{where}}}": f"{days * 86_400}x10"}
    labels = {"severity": "warning", "job": "gateway", "instance": "g:9464", "neuronpipe_tls_side": "server"}
    _check(tmp_path, "NeuronpipeCertificateExpires", series, [labels] if fires else [])


@pytest.mark.parametrize(("values", "fires"), [("1x10", True), ("0x8 1x2", False)])
def test_changed_tls_files_that_stay_unusable_fire(tmp_path: Path, values: str, fires: bool) -> None:
    """For a moment they may be half-written."""
    where = f'{_GATEWAY}, neuronpipe_tls_side="client"'
    labels = {"severity": "warning", "job": "gateway", "instance": "g:9464", "neuronpipe_tls_side": "client"}
    series = {f"neuronpipe_tls_files_rejected{{{where}}}": values}
    _check(tmp_path, "NeuronpipeCertificateRejected", series, [labels] if fires else [])


@pytest.mark.parametrize(("seconds", "fires"), [("700x10", True), ("0+55x10", False)])
def test_jobs_that_wait_for_long_fire_once_despite_many_workers(tmp_path: Path, seconds: str, fires: bool) -> None:
    where = 'job="worker", neuronpipe_job_priority="normal"'
    series = {f'neuronpipe_jobs_oldest_seconds{{{where}, instance="{pod}:9464"}}': seconds for pod in ("v", "w")}
    labels = {"severity": "warning", "neuronpipe_job_priority": "normal"}
    _check(tmp_path, "NeuronpipeJobBacklog", series, [labels] if fires else [])


@pytest.mark.parametrize(("dead", "fires"), [("1x10", True), ("0x10", False)])
def test_a_job_that_was_set_aside_fires(tmp_path: Path, dead: str, fires: bool) -> None:
    series = {'neuronpipe_jobs_dead{job="worker", instance="w:9464"}': dead}
    _check(tmp_path, "NeuronpipeDeadLetterJobs", series, [{"severity": "warning"}] if fires else [])


@pytest.mark.parametrize(("loaded", "fires"), [("0x10", True), ("1x10", False)])
def test_a_file_that_cannot_be_used_fires(tmp_path: Path, loaded: str, fires: bool) -> None:
    labels = {"job": "gateway", "instance": "g:9464", "neuronpipe_file": "registry.json"}
    series = {f'neuronpipe_file_loaded{{{_GATEWAY}, neuronpipe_file="registry.json"}}': loaded}
    _check(tmp_path, "NeuronpipeFileRejected", series, [{"severity": "warning", **labels}] if fires else [])


@pytest.mark.parametrize(
    ("series", "fires"),
    [({}, True), ({_GATEWAY: "0x10"}, False), ({_GATEWAY: "3x2"}, True), ({_GATEWAY: "3x2", _OTHER: "0x10"}, False)],
    ids=["no gateway ever", "an idle gateway", "the last gateway stops", "one of two gateways stops"],
)
def test_gateways_that_are_all_gone_fire(tmp_path: Path, series: dict[str, str], fires: bool) -> None:
    named = {f"neuronpipe_request_in_flight{{{where}}}": values for where, values in series.items()}
    _check(tmp_path, "NeuronpipeGone", named, [{"severity": "critical"}] if fires else [])


@pytest.mark.parametrize(("job", "up", "fires"), [("gateway", "0x10", True), ("gateway", "1x8 0x2", False)])
def test_one_process_that_cannot_be_reached_fires(tmp_path: Path, job: str, up: str, fires: bool) -> None:
    labels = {"severity": "warning", "job": job, "instance": "h:9464"}
    series = {f"up{{{_GATEWAY}}}": "1x10", f'up{{job="{job}", instance="h:9464"}}': up}
    _check(tmp_path, "NeuronpipeProcessUnreachable", series, [labels] if fires else [])


def test_a_process_of_another_system_that_cannot_be_reached_does_not_fire(tmp_path: Path) -> None:
    _check(tmp_path, "NeuronpipeProcessUnreachable", {'up{job="node", instance="n:9100"}': "0x10"}, [])


@pytest.mark.parametrize(("well", "fires"), [("0x10", True), ("1x10", False)])
def test_an_impaired_process_fires(tmp_path: Path, well: str, fires: bool) -> None:
    labels = {"severity": "critical", "job": "neuron-executor", "instance": "e:9464"}
    series = {'neuronpipe_process_well{job="neuron-executor", instance="e:9464"}': well}
    _check(tmp_path, "NeuronpipeImpaired", series, [labels] if fires else [])


@pytest.mark.parametrize(("failed", "fires"), [("1x10", True), ("1x3 0x7", False)])
def test_a_version_that_stays_without_loading_fires(tmp_path: Path, failed: str, fires: bool) -> None:
    where = {"job": "gateway", "instance": "g:9464", "neuronpipe_model_name": "m", "neuronpipe_model_version": "2"}
    named = ", ".join(f'{label}="{value}"' for label, value in where.items())
    series = {
        f'neuronpipe_version_state{{{named}, neuronpipe_model_state="failed"}}': failed,
        f'neuronpipe_version_state{{{named}, neuronpipe_model_state="loading"}}': "1x10",
    }
    labels = [{"severity": "warning", **where}]
    _check(tmp_path, "NeuronpipeVersionFailed", series, labels if fires else [])


def test_the_texts_of_alerts_name_no_files_of_this_repository() -> None:
    """Who is woken by one has no checkout."""
    groups = yaml.safe_load(_RULES.read_text())["groups"]
    annotations = [rule["annotations"] for group in groups for rule in group["rules"]]
    assert [text for texts in annotations for text in texts.values() if re.search(r"(?<!example/)\bdocs/", text)] == []


def test_a_new_alert_has_a_case() -> None:
    alerts = {rule["alert"] for group in yaml.safe_load(_RULES.read_text())["groups"] for rule in group["rules"]}
    with_case = set(re.findall(r'_check\(tmp_path, "(\w+)"', Path(__file__).read_text()))
    assert alerts - with_case == _WITHOUT_CASE, "write a case of the alert in this file"
