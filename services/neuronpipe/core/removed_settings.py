"""Settings that former versions had, each with the reason why it is refused."""

from collections.abc import Mapping
from types import MappingProxyType

# setting → the reason
REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "batch_limit_s": "it is always 60 seconds",
        "cores_per_replica": "a replica always has one core, or one for each part of its model",
        "fair_window_ms": "it is always 20 milliseconds",
        "http_max_body_bytes": "it is always 8 times max_input_bytes",
        "image_cache_bytes": "it is always as large as token_cache_bytes",
        "jobs_max_inputs": "it is always 1,000; submit more inputs as an input_uri",
        "jobs_max_open": "it is always 100,000",
        "jobs_max_payload_bytes": "it is always 1 MiB; submit larger jobs as an input_uri",
        "jobs_redis_prefix": "it is always neuronpipe-jobs; give each deployment its own database in jobs_redis_url",
        "jobs_ttl_s": "it is always six hours where a job has no time_to_live_s",
        "jwt_clock_skew_s": "it is always 30 seconds",
        "max_batch_items": "it is always 256",
        "max_batch_response_bytes": "it is always 64 MiB",
        "max_connection_age_grace_s": "it is always one hour",
        "max_connection_calls": "it is always 2,048",
        "max_handshake_s": "it is always 30 seconds",
        "max_header_bytes": "it is always 16 KiB",
        "max_held_bytes": "it is always 64 MiB; max_held_requests limits the requests",
        "max_http_inputs": "it is always 2,048",
        "max_message_bytes": "it is always 64 MiB",
        "max_queue_sequences": "it is always 4,096",
        "max_receive_s": "it is always 60 seconds",
        "max_request_tokens": "it is always 524,288",
        "max_send_s": "it is always 300 seconds",
        "max_stream_idle_s": "it is always 300 seconds at gateways, and without a limit at stages",
        "max_stream_in_flight": "it is always 64",
        "redis_connections": "it is always 8",
        "redis_timeout_ms": "it is always 25 milliseconds",
        "registry_poll_s": "it is always one second",
        "repository_endpoint": "set AWS_ENDPOINT_URL, and AWS_ALLOW_HTTP=true for http://",
        "result_cache_redis": "results are in Redis where the gateway has a redis_url",
        "scaler_idle_s": "it is always 30 seconds",
        "step_tokens": "it is always 256",
    }
)


def why_removed(name: str) -> str:
    """Returns "was removed: REASON" for a setting, its option or its variable; empty for an unknown name."""
    reason = REMOVED.get(name.removeprefix("--").replace("-", "_").lower(), "")
    return reason and f"was removed: {reason}"
