# SPDX-License-Identifier: BSD-3-Clause
"""The publisher's side of a channel: the requests of its peer, and what becomes of each.

    WAITING -> WRITING -> DONE              the request knows the tensor's dtype and shape
    WAITING -> ASKED -> WRITING -> DONE     it does not: the metadata is sent, and it asks again
    WAITING -> DONE                         an error, a dead tensor, one without bytes
    any of them -> DONE                     it is cancelled; a tensor that was not all written waits for somebody else

It neither waits nor sleeps. Everything here happens under the engine's lock.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable

from shiftverbs.tensors.errors import ChannelError, MessageError
from shiftverbs.tensors.messages import (
    Cancel,
    Cancelled,
    ErrorStatus,
    Message,
    MetadataResponse,
    Request,
    ReRequest,
    Target,
)
from shiftverbs.tensors.publication import Publication, Published, Source
from shiftverbs.tensors.puller import CHUNK_BYTES
from shiftverbs.transport import Link
from shiftverbs.transport.link import Kind


class State(enum.Enum):
    """Where a response is."""

    WAITING = "waiting"
    ASKED = "asked"
    WRITING = "writing"
    DONE = "done"


class Response:
    """What becomes of one request. publisher: whose peer asked."""

    def __init__(self, publisher: Publisher, request: Request) -> None:
        self.publisher, self.request = publisher, request
        self.index, self.target = request.index, request.target
        self.state = State.WAITING
        self.publication: Publication | None = None
        self.source: Source | None = None
        self.offset = 0
        self.last = 0  # of the link's `completed`, when all that was posted has been read
        self.given_back = False


class Publisher:
    """The responses of one channel.

    :param scope: the channel: what is published for it alone is published with this
    :param published: the node's
    :param send: sends a message to the peer
    """

    def __init__(self, scope: Hashable, published: Published, send: Callable[[Message], None]) -> None:
        self.scope = scope
        self._published, self._send = published, send
        self._responses: dict[int, Response] = {}
        self._writing: deque[Response] = deque()
        self._draining: list[Response] = []
        self._ended = False

    @property
    def is_busy(self) -> bool:
        """Whether the peer is written to, or waited for."""
        return bool(self._writing or self._draining) or any(
            response.state is State.ASKED for response in self._responses.values()
        )

    def handle_message(self, message: Message) -> None:
        """One that a puller sends. Raises MessageError where it makes no sense."""
        response = self._responses.get(message.index)
        if isinstance(message, Request):
            if response is not None:
                raise MessageError(f"a second request {message.index} before the first one has an answer")
            if message.metadata is not None and message.metadata.nbytes and not message.target.rkey:
                raise MessageError(f"request {message.index} knows the tensor, and names no memory for it")
            response = self._responses[message.index] = Response(self, message)
            publication = self._published.request(self.scope, (message.key, message.step), response)
            if publication is not None:
                serve(response, publication)
        elif isinstance(message, ReRequest):
            if response is None or response.state is not State.ASKED:
                raise MessageError(f"request {message.index} comes again, and nobody asked for that")
            response.target = message.target
            self._write(response)
        elif isinstance(message, Cancel):
            if response is not None:
                self._published.cancel(response)
                self._end(response, given_back=True)
            self._send(Cancelled(message.index))

    def serve(self, response: Response, publication: Publication) -> None:
        """The tag table gave a response its tensor."""
        source = publication.begin()
        if self._ended or response.state is not State.WAITING:
            self._give_back(publication, source)
            return
        response.publication, response.source = publication, source
        metadata = publication.metadata
        if publication.error is not None:
            self._send(ErrorStatus(response.index, publication.error))
            self._end(response)
        elif source is None:
            self._send(MetadataResponse(response.index, metadata))
            self._end(response)
        elif response.request.metadata == metadata:
            self._write(response)
        else:
            response.state = State.ASKED
            response.source = publication.keep_copy(source, self._published.pool)
            self._send(MetadataResponse(response.index, metadata))

    def _write(self, response: Response) -> None:
        response.state = State.WRITING
        self._writing.append(response)

    def pump(self, link: Link) -> bool:
        """Write what there is room for, one chunk of each tensor in turn. Returns whether it was something."""
        some = False
        while self._writing and link.room():
            some = True
            response = self._writing.popleft()
            assert response.publication is not None and response.source is not None
            source, nbytes = response.source, response.publication.metadata.nbytes
            length = min(CHUNK_BYTES, nbytes - response.offset)
            target = Target(response.target.address + response.offset, response.target.rkey)
            response.last = link.write(
                Kind.DATA, response.index, (source.address + response.offset, length, source.lkey), target
            )
            response.offset += length
            if response.offset == nbytes:
                # The peer may use the index again as soon as it has all of it.
                del self._responses[response.index]
                response.state = State.DONE
                self._draining.append(response)
            else:
                self._writing.append(response)
        return some

    def retire(self, completed: int) -> bool:
        """Let go of what has been read. completed: the link's. Returns whether there was something."""
        if not self._draining:
            return False
        over = [response for response in self._draining if response.last <= completed]
        if over:
            self._draining = [response for response in self._draining if response.last > completed]
            for response in over:
                assert response.publication is not None
                response.publication.end(response.source, given_back=False)
        return bool(over)

    def _end(self, response: Response, given_back: bool = False) -> None:
        """A response is over before all was written. given_back: the peer has not got what the tag table gave it."""
        del self._responses[response.index]
        state, response.state = response.state, State.DONE
        publication, source = response.publication, response.source
        if publication is None:
            return
        if state is State.WRITING:
            self._writing.remove(response)
        if not given_back:
            publication.end(source, given_back=False)
            return
        if state is State.WRITING and response.offset and source is not None:
            # It is being read still. The count of readers is one more until that is over.
            source.readers += 1
            response.given_back = True
            self._draining.append(response)
        self._give_back(publication, source)

    def _give_back(self, publication: Publication, source: Source | None) -> None:
        if publication.end(source, given_back=True):
            for other in self._published.give_back(publication):
                serve(other, publication)

    def end(self, why: str) -> None:
        """The channel has ended, and its QP reads nothing any longer. What the peer has not got waits for others."""
        self._ended = True
        for waiting in self._published.drop(self.scope, why):
            waiting.state = State.DONE
        responses = {id(r): r for r in (*self._responses.values(), *self._draining)}
        self._responses.clear()
        self._writing.clear()
        self._draining.clear()
        for response in responses.values():
            response.state = State.DONE
            publication = response.publication
            if publication is None:
                continue
            if publication.scope is not None:
                publication.fail(ChannelError(why))
            elif response.given_back:
                publication.end(response.source, given_back=False)
            else:
                self._give_back(publication, response.source)


def serve(response: Response, publication: Publication) -> None:
    """A response gets its tensor; it may be another channel's."""
    response.publisher.serve(response, publication)
