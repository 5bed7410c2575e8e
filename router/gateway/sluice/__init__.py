"""Client library of Sluice: prompts in, streams of tokens out, over one socket per client.

    with sluice.Client("tcp://127.0.0.1:5550") as client:
        for event in client.generate([1, 2, 3], max_tokens=16):
            print(event)
        result = client.generate([1, 2, 3], max_tokens=16).result()

`AsyncClient` is the same for asyncio. Both keep many requests in flight over one DEALER socket;
events of one request are numbered by the router, and a gap or a repeat raises ProtocolError.
"""
from .aio import AsyncClient, AsyncStream
from .client import Client, Stream
from .errors import (ConnectionLost, ConnectTimeout, ProtocolError, RequestError, RequestTimeout,
                     SluiceError)
from .protocol import Info, RankStatus, SamplingParams, Status
from .raw import RawConnection
from .request import PromptLogprobsEvent, Result, Timings, TokensEvent

__version__ = "0.1.0"

__all__ = [
    "AsyncClient", "AsyncStream", "Client", "ConnectTimeout", "ConnectionLost", "Info",
    "PromptLogprobsEvent", "ProtocolError", "RankStatus", "RawConnection", "RequestError",
    "RequestTimeout", "Result", "SamplingParams", "SluiceError", "Status", "Stream", "Timings",
    "TokensEvent",
]
