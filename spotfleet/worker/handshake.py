"""Mutual proof of the job's key over a new connection, without sending the key.

    client connects --nonce S--> client --nonce C, MAC(key, "client" S C)--> server --MAC(key, "server" S C)--> in use

Bootstrap stores (store.py) and connections to a coordinator over TCP (control.py) begin with it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket

NONCE, MAC = 16, 32  # bytes


def mac(key: str, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.new(key.encode(), side + server_nonce + client_nonce, hashlib.sha256).digest()


def prove(sock: socket.socket, key: str, server: str) -> None:
    """Run the client's side. ConnectionError, which names `server`, if the server does not know the key."""
    server_nonce, client_nonce = receive(sock, NONCE, server), secrets.token_bytes(NONCE)
    sock.sendall(client_nonce + mac(key, b"client", server_nonce, client_nonce))
    if not hmac.compare_digest(receive(sock, MAC, server), mac(key, b"server", server_nonce, client_nonce)):
        raise ConnectionError(f"the {server} does not know this job's key")


def admit(sock: socket.socket, key: str) -> None:
    """Run the server's side within the socket's timeout. ConnectionError if the client does not know the key."""
    server_nonce = secrets.token_bytes(NONCE)
    sock.sendall(server_nonce)
    answer = receive(sock, NONCE + MAC, "client")
    client_nonce, proof = answer[:NONCE], answer[NONCE:]
    if not hmac.compare_digest(proof, mac(key, b"client", server_nonce, client_nonce)):
        raise ConnectionError("the client does not know this job's key")
    sock.sendall(mac(key, b"server", server_nonce, client_nonce))


def receive(sock: socket.socket, size: int, peer: str) -> bytes:
    """Return exactly `size` bytes; ConnectionError, which names `peer`, if the connection ends before."""
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError(f"the {peer} has gone, or refuses this job's key")
        data += piece
    return data
