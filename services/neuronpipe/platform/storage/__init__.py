"""Objects by URI: s3://BUCKET/KEY, and file:///PATH."""
