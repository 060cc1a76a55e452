"""`neuronpipe trace`: one request, and where its time went."""
