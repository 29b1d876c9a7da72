"""Faults on demand. A fault is a JSON object:

    {"path": regex searched in the raw path, "method": any by default, "nth": 1, "times": 1 (-1: always),
     "action": ..., and the action's own fields}

The actions:

status            this status instead of an answer: status, headers, body, message
slow              the answer comes late: seconds
held              the answer comes when the faults are cleared
cut_request       the connection breaks while the body is read: after (bytes)
cut_response      the connection breaks while the answer is sent: after (bytes)
lost_reply        the work is done, the connection breaks instead of an answer
corrupt_request   one bit of the body is flipped as it arrives
corrupt_response  one bit of the answer is flipped as it is sent
headers           other headers than the true ones: headers
"""

import re
import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Faults:
    """The faults in force, counted request by request."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    active: list[dict[str, Any]] = field(default_factory=list)

    def clear(self) -> None:
        with self.lock:
            self.active = []

    def add(self, fault: dict[str, Any]) -> None:
        with self.lock:
            self.active.append({"seen": 0, "fired": 0, **fault})

    def take(self, method: str, path: str) -> dict[str, Any]:
        """The fault that this request meets; {} for none. Every matching fault counts the request."""
        taken: dict[str, Any] = {}
        with self.lock:
            for fault in self.active:
                if fault.get("method", method) != method or not re.search(fault["path"], path):
                    continue
                fault["seen"] += 1
                first, times = fault.get("nth", 1), fault.get("times", 1)
                due = fault["seen"] >= first and (times < 0 or fault["seen"] < first + times)
                if due and not taken:
                    taken = fault
                    fault["fired"] += 1
        return taken


def flip_last_bit(chunk: bytes) -> bytes:
    return chunk[:-1] + bytes([chunk[-1] ^ 1])
