"""What is counted of ids on their way into a file."""

import io
from hashlib import sha256

import numpy as np

from fastbrain.tokens.id_writer import IdWriter


def test_tokens_largest_id_and_digest_are_of_all_arrays():
    file = io.BytesIO()
    writer = IdWriter(file)
    assert (writer.tokens, writer.max_id) == (0, -1)
    for ids in ([3, 2**32 - 1], [], [5]):
        writer.add(np.array(ids, np.uint32))
    assert file.getvalue() == b"\3\0\0\0\xff\xff\xff\xff\5\0\0\0"
    assert (writer.tokens, writer.max_id) == (3, 2**32 - 1)
    assert writer.sha256() == sha256(file.getvalue()).hexdigest()
