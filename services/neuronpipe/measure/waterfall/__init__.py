"""`neuronpipe trace`: draws the trace of one request."""
