"""gRPC over HTTP/2 by nghttp2 on an event loop: connections, and the sides of server and client."""
