"""Token ids on disk and in batches, and the way from text to them."""

from fastbrain.tokens.token_batch import TokenBatch
from fastbrain.tokens.token_file import TokenFile

__all__ = ["TokenBatch", "TokenFile"]
