"""Remote procedure calls between ranks, over any backend."""
