import socket

from mlxspec.distributed.channel import _accept

GUESSES = (
    *(b"GET /\n", b"guess 1\n", b"gu\xc3\xa9ss 1\n", b"secret\n", b"secret 2\n", b"secret 1"),
    *(b"\xff" * 1024, b"3\n", b"\n", b""),
)


def test_a_stranger_is_turned_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        strangers = [greeting(listener, text) for text in GUESSES]
        rank_1 = greeting(listener, b"secret 1\n")
        peers = _accept(listener, "secret", 1)
        assert list(peers) == [1]
        assert peers[1].getpeername() == rank_1.getsockname()
        for connection in (*strangers, rank_1, *peers.values()):
            connection.close()


def greeting(listener: socket.socket, text: bytes) -> socket.socket:
    """Open a connection and send some bytes."""
    connection = socket.create_connection(listener.getsockname())
    connection.sendall(text)
    connection.shutdown(socket.SHUT_WR)
    return connection
