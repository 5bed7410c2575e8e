"""What can go wrong, as exceptions. All derive from SluiceError."""


class SluiceError(Exception):
    """Base of every error of this package."""


class RequestError(SluiceError):
    """The router ended a request with `failed`. `code` is a stable name such as "invalid"."""

    def __init__(self, code, message, request_id=""):
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.request_id = request_id

    def __reduce__(self):
        return type(self), (self.code, self.message, self.request_id)


class ConnectTimeout(SluiceError):
    """No router answered at the address in time."""


class ConnectionLost(SluiceError):
    """The connection broke while something was waited for. What was asked may have happened."""


class RequestTimeout(SluiceError):
    """The caller's own time for a request or a question ran out. A request is canceled then."""


class ProtocolError(SluiceError):
    """The router sent something it must not: a gap, a repeat, a field of the wrong kind."""
