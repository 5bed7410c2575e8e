"""A router for tests of the client alone: real ZeroMQ, scripted answers.

Each test gives a function `script(router, peer, message)`; it is called on the router's thread for
every decoded message, and answers with router.send(peer, ...).
"""
import threading

import msgpack
import zmq
from sluice.protocol import VERSION

INFO = {"model": "fake", "vocab_size": 256, "max_model_len": 1024, "max_prompt_len": 1000,
        "tokenizer_path": ""}


class FakeRouter:
    def __init__(self, script=None, port=None):
        self.script = script or (lambda *_: None)
        self.received = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop_in = self._context.socket(zmq.PAIR)
        self._stop_in.bind("inproc://stop")
        self._stop_out = self._context.socket(zmq.PAIR)
        self._stop_out.connect("inproc://stop")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def port(self):
        return int(self.address.rsplit(":", 1)[1])

    def send(self, peer, kind, **fields):
        self.send_bytes(peer, msgpack.packb({"v": VERSION, "type": kind, **fields}))

    def send_bytes(self, peer, frame):
        self._socket.send_multipart([peer, frame])

    def tokens(self, peer, request_id, seq, index, tokens, finish="", **fields):
        self.send(peer, "tokens", id=request_id, seq=seq, index=index, tokens=tokens,
                  finish_reason=finish, **fields)

    def _run(self):
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop_in, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop_in in ready:
                break
            peer, frame = self._socket.recv_multipart()
            message = msgpack.unpackb(frame)
            self.received.append(message)
            if message["type"] == "info":
                self.send(peer, "info_reply", **INFO)
            else:
                self.script(self, peer, message)
        self._socket.close(0)
        self._stop_in.close(0)

    def close(self):
        self._stop_out.send(b"")
        self._thread.join()
        self._stop_out.close(0)
        self._context.term()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def echo(router, peer, message):
    """Answers a prompt with itself, a token an event, all in reverse order of urgency: it proves
    nothing about models, and everything about streams."""
    if message["type"] != "generate":
        return
    prompt = message["tokens"]
    for i, token in enumerate(prompt):
        finish = "length" if i == len(prompt) - 1 else ""
        router.tokens(peer, message["id"], i, i, [token], finish)
