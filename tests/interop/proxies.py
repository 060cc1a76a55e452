"""Proxies before a server: their configurations, and how each is started."""

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template

from tests.servers.ports import free_port
from tests.suite.waiting import until

_LIMIT_S = 20.0
# Headers up to what the server accepts, and no limit of time or size that is not the server's.
_ENVOY = """
static_resources:
  listeners:
  - address: {socket_address: {address: 127.0.0.1, port_value: $port}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          codec_type: HTTP2
          stat_prefix: interop
          stream_idle_timeout: 0s
          http2_protocol_options: {max_concurrent_streams: 2000, max_outbound_frames: 100000}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{match: {prefix: /}, route: {cluster: server, timeout: 0s}}]
  clusters:
  - name: server
    connect_timeout: 5s
    circuit_breakers: {thresholds: [{max_requests: 10000, max_connections: 10000, max_pending_requests: 10000}]}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
    load_assignment:
      cluster_name: server
      endpoints:
      - lb_endpoints:
        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: $server}}}
"""
_NGINX = """
daemon off;
pid $folder/pid;
error_log $folder/error.log;
worker_processes 1;
events { worker_connections 8192; }
http {
  access_log off;
  client_body_temp_path $folder/body;
  proxy_temp_path $folder/proxy;
  fastcgi_temp_path $folder/fastcgi;
  uwsgi_temp_path $folder/uwsgi;
  scgi_temp_path $folder/scgi;
  client_max_body_size 0;
  keepalive_requests 1000000;
  http2_max_concurrent_streams 2000;
  large_client_header_buffers 8 64k;
  server {
    listen 127.0.0.1:$port http2;
    location / { grpc_pass grpc://127.0.0.1:$server; grpc_read_timeout 600s; grpc_send_timeout 600s; }
  }
}
"""
_HAPROXY = """
global
  maxconn 8192
  tune.h2.max-concurrent-streams 2000
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
frontend callers
  bind 127.0.0.1:$port proto h2
  default_backend server
backend server
  server one 127.0.0.1:$server proto h2
"""


@dataclass(frozen=True, slots=True)
class Proxy:
    """`command`: the program, and its arguments before the file with its configuration."""

    name: str
    configuration: str
    command: tuple[str, ...]


PROXIES = {
    proxy.name: proxy
    for proxy in (
        Proxy(
            "Envoy",
            _ENVOY,
            (".venv-interop/bin/envoy", "--use-dynamic-base-id", "--concurrency", "1", "--log-level", "error", "-c"),
        ),
        Proxy("nginx", _NGINX, ("/usr/sbin/nginx", "-c")),
        Proxy("HAProxy", _HAPROXY, ("/usr/sbin/haproxy", "-q", "-db", "-f")),
    )
}


@contextmanager
def running_proxy(proxy: Proxy, server: str, folder: Path) -> Iterator[str]:
    """The address of a proxy before a server. `folder`: for its files."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    values = {"port": port, "server": server.rpartition(":")[2], "folder": folder}
    with running(proxy.command, Template(proxy.configuration).substitute(values), port, folder) as address:
        yield address


@contextmanager
def running(command: Sequence[str], configuration: str, port: int, folder: Path) -> Iterator[str]:
    """The address of a program that is given the file of its configuration, and listens on the port."""
    path = folder / "configuration.yaml"
    path.write_text(configuration)
    process = subprocess.Popen([*command, str(path)])
    try:
        _wait_until_it_listens(port, process)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(_LIMIT_S)


def _wait_until_it_listens(port: int, process: "subprocess.Popen[bytes]") -> None:
    def listens() -> bool:
        assert process.poll() is None, "the proxy has ended"
        socket.create_connection(("127.0.0.1", port)).close()
        return True

    until(listens, "the proxy listens")
