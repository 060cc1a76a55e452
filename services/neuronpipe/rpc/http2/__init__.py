"""gRPC over HTTP/2 by nghttp2, on an event loop: connections, the server's side, the client's side."""
