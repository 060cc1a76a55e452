"""Forms batches: the queue, the policies that choose what runs together, and the forecast of batch times."""
