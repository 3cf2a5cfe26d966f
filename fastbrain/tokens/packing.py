"""Which documents share a row: best fit, longest first, so that little of the rows is padding."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from fastbrain.errors import InvalidConfig


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Documents of these lengths in rows of `capacity`: for each row the indices of its documents.

    Each goes where it leaves the least room, of equals into the row opened first. Indices rise in
    a row, and rows are in the order of their first documents, so a stretch of rows holds documents
    of all lengths. Raises InvalidConfig for a length outside 1..capacity.
    """
    rows: list[list[int]] = []
    # rows with the same room left, in a heap, and the rooms that some row has, sorted
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if not 1 <= length <= capacity:
            raise InvalidConfig(
                f"document {index} has {length} tokens; a row takes from 1 to {capacity}"
            )
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[at]
            row = heapq.heappop(by_room[room])
            if not by_room[room]:
                del by_room[room], rooms[at]
        rows[row].append(index)
        room -= length
        if room:
            if room not in by_room:
                by_room[room] = []
                insort(rooms, room)
            heapq.heappush(by_room[room], row)
    return sorted(sorted(row) for row in rows)
