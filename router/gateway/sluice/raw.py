"""A bare connection for tests and tools: bytes out, decoded maps in, no checks in between."""
import time

import zmq

from . import protocol
from .errors import RequestTimeout


class RawConnection:
    """One DEALER of its own. send() takes any bytes; receive() the next message as a dict."""

    def __init__(self, address, linger_ms=0):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, linger_ms)
        self._socket.connect(address)

    def send(self, *frames):
        """Several arguments are several frames of one ZeroMQ message."""
        self._socket.send_multipart(frames)

    def send_message(self, kind, **fields):
        self.send(protocol.encode(kind, **fields))

    def receive(self, timeout_s=10.0):
        if not self._socket.poll(int(timeout_s * 1000)):
            raise RequestTimeout(f"no message within {timeout_s} s")
        return protocol.decode(b"".join(self._socket.recv_multipart()))

    def receive_until(self, accept, timeout_s=10.0):
        """The next message that accept(message) is true for; others are dropped."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            message = self.receive(max(0.0, deadline_s - time.monotonic()))
            if accept(message):
                return message

    def close(self):
        self._socket.close()
        self._context.term()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
