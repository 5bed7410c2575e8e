"""The ZeroMQ DEALER both clients speak through: options, and how a broken link is noticed.

ZeroMQ reconnects silently, but a router that was restarted knows nothing of earlier requests.
So the socket's monitor is read too: after a disconnect every open request is failed.
"""
import zmq
from zmq.utils.monitor import parse_monitor_message

TCP_PROBES = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 2, zmq.TCP_KEEPALIVE_INTVL: 2,
              zmq.TCP_KEEPALIVE_CNT: 5, zmq.TCP_MAXRT: 10_000}
RECONNECT_MS = 100
RECONNECT_MAX_MS = 2_000
# What is still unsent at close() is given this long; a cancel on the way out should arrive.
LINGER_MS = 200


def open_dealer(context, address):
    """A connecting DEALER. Wrong addresses raise zmq.ZMQError with a readable text."""
    socket = context.socket(zmq.DEALER)
    monitor = None
    try:
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        # Frames go to a link that is up, or wait with the client, who can take them back.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        # TCP's own probes tell of a host that is gone. ZeroMQ's pings must stay off: it reads
        # nothing, pongs included, while a queue is full, and may abort a peer that answers late.
        for option, value in TCP_PROBES.items():
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(address)
    except BaseException:
        if monitor is not None:
            socket.disable_monitor()
            monitor.close(0)
        socket.close(0)
        raise
    return socket, monitor


def is_disconnect(monitor_frames):
    return parse_monitor_message(monitor_frames)["event"] == zmq.EVENT_DISCONNECTED
