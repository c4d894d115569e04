"""As much of MongoDB's protocol as it takes to set a server up and to log in.

A request and its reply are each one OP_MSG with one BSON document:

    length  id  reply-to  2013   flags  0   document
    int32   int32  int32  int32  int32  u8  BSON

All numbers are little-endian.
"""

import base64
import hashlib
import hmac
import os
import socket
import struct

OP_MSG = 2013


class Refused(Exception):
    """The server's answer to a command that it did not carry out."""

    def __init__(self, reply: dict):
        super().__init__(f"{reply.get('codeName')}: {reply.get('errmsg')}")
        self.name = reply.get("codeName")


class Connection:
    """Raises OSError where nobody listens or the connection breaks."""

    def __init__(self, host: str, port: int):
        self._socket = socket.create_connection((host, port), timeout=5)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_) -> None:
        self._socket.close()

    def command(self, document: dict) -> dict:
        """Runs a command, in the database `admin` unless it names another as `$db`."""
        # The command's name must come first in the document.
        content = bytes(5) + encode(document | {"$db": document.get("$db", "admin")})
        self._socket.sendall(struct.pack("<iiii", 16 + len(content), 1, 0, OP_MSG) + content)
        length = struct.unpack("<iiii", self._exactly(16))[0]
        reply = decode(self._exactly(length - 16)[5:])
        if reply.get("ok") != 1:
            raise Refused(reply)
        return reply

    def log_in(self, user: str, password: str) -> None:
        """By SCRAM-SHA-256 (RFC 5802); who the server is need not be proved here."""
        nonce = base64.b64encode(os.urandom(18)).decode()
        opening = f"n={user.replace('=', '=3D').replace(',', '=2C')},r={nonce}"
        start = {"saslStart": 1, "mechanism": "SCRAM-SHA-256", "payload": b"n,," + opening.encode()}
        asked = self.command(start | {"options": {"skipEmptyExchange": True}})
        challenge = asked["payload"].decode()
        parts = dict(part.split("=", 1) for part in challenge.split(","))
        salted = hashlib.pbkdf2_hmac("sha256", password.encode(), base64.b64decode(parts["s"]), int(parts["i"]))
        key = hmac.digest(salted, b"Client Key", "sha256")
        closing = f"c=biws,r={parts['r']}"
        signed = hmac.digest(hashlib.sha256(key).digest(), f"{opening},{challenge},{closing}".encode(), "sha256")
        proof = base64.b64encode(bytes(left ^ right for left, right in zip(key, signed))).decode()
        answer = f"{closing},p={proof}".encode()
        self.command({"saslContinue": 1, "conversationId": asked["conversationId"], "payload": answer})

    def _exactly(self, length: int) -> bytes:
        content = b""
        while len(content) < length:
            more = self._socket.recv(length - len(content))
            if not more:
                raise ConnectionError("the server closed the connection")
            content += more
        return content


def encode(document: dict) -> bytes:
    content = b"".join(_element(name, value) for name, value in document.items())
    return struct.pack("<i", len(content) + 5) + content + b"\0"


def _element(name: str, value) -> bytes:
    match value:
        case bool():
            kind, content = 0x08, bytes([value])
        case int():
            kind, content = 0x10, struct.pack("<i", value)
        case str():
            kind, content = 0x02, struct.pack("<i", len(value.encode()) + 1) + value.encode() + b"\0"
        case bytes():
            kind, content = 0x05, struct.pack("<ib", len(value), 0) + value
        case dict():
            kind, content = 0x03, encode(value)
        case list():
            kind, content = 0x04, encode({str(index): item for index, item in enumerate(value)})
        case _:
            raise TypeError(f"{name}: {type(value).__name__} is not sent to MongoDB here")
    return bytes([kind]) + name.encode() + b"\0" + content


def decode(document: bytes) -> dict:
    """What nobody asks for, such as times and object ids, comes as its bytes."""
    fields = {}
    rest = document[4:-1]
    while rest:
        kind = rest[0]
        name, _, rest = rest[1:].partition(b"\0")
        value, length = _value(kind, rest)
        fields[name.decode()] = value
        rest = rest[length:]
    return fields


def _value(kind: int, content: bytes) -> tuple:
    """A value and how many bytes it takes."""
    number = int.from_bytes(content[:4], "little", signed=True)
    match kind:
        case 0x01:
            return struct.unpack("<d", content[:8])[0], 8
        case 0x02:
            return content[4 : number + 3].decode(), number + 4
        case 0x03:
            return decode(content[:number]), number
        case 0x04:
            return list(decode(content[:number]).values()), number
        case 0x05:
            return content[5 : number + 5], number + 5
        case 0x07:
            return content[:12], 12
        case 0x08:
            return content[0] == 1, 1
        case 0x09 | 0x11:
            return content[:8], 8
        case 0x0A:
            return None, 0
        case 0x10:
            return number, 4
        case 0x12:
            return int.from_bytes(content[:8], "little", signed=True), 8
    raise ValueError(f"MongoDB sent a value of type {kind:#x}")
