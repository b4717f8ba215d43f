# SPDX-License-Identifier: BSD-3-Clause
"""An echo server and its client on asyncio: completions wake the event loop, nothing polls.

python asyncio_echo.py            the server: sends back what it gets
python asyncio_echo.py SERVER     the client
"""

import asyncio

from endpoint import Endpoint, arguments, meet

import shiftverbs.enums as e

LENGTH, SLOTS = 64, 8
OUT = LENGTH * SLOTS  # behind the receives: the message that is sent


class Messages:
    """Messages over an endpoint, as an asyncio program wants them."""

    def __init__(self, endpoint):
        self._endpoint = endpoint
        self._received = asyncio.Queue()
        self._sent = asyncio.Semaphore(1)
        asyncio.get_running_loop().add_reader(endpoint.channel.fd, self._ready)
        endpoint.cq.req_notify()
        self._take()  # what came before that brings no event

    def _ready(self):
        """The descriptor is readable: take the event, ask for the next one, then empty the CQ, in this order.

        While traffic moves from one NIC to another, an event may come with nothing in the CQ.
        """
        cq = self._endpoint.cq
        self._endpoint.channel.get_cq_event(cq)
        cq.ack_events(1)
        cq.req_notify()
        self._take()

    def _take(self):
        """All completions that there are."""
        while wcs := self._endpoint.poll():
            for wc in wcs:
                if wc.opcode == e.IBV_WC_RECV:
                    self._received.put_nowait(self._endpoint.mr.read(wc.byte_len, wc.wr_id))
                    self._endpoint.receive(wc.wr_id, LENGTH)
                else:
                    self._sent.release()

    async def send(self, data):
        """Send one message when the one before has been delivered. data: at most LENGTH bytes."""
        await self._sent.acquire()
        self._endpoint.mr.write(data, len(data), OUT)
        self._endpoint.send(OUT, len(data))

    async def receive(self):
        """The next message."""
        return await self._received.get()


async def serve(messages):
    while True:
        await messages.send(await messages.receive())


async def ask(messages, shift):
    number = 0
    while True:
        text = f"message {number}"
        await messages.send(text.encode())
        answer = (await messages.receive()).decode()
        assert answer == text, answer
        number += 1
        if number % 50 == 0:
            print(f"{number} answers, {shift.status} on {shift.path}", flush=True)
        await asyncio.sleep(0.01)


async def tick():
    """Another task of the program, which no failure holds up."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + 0.05
        await asyncio.sleep(0.05)
        if loop.time() - due > 1:
            print(f"the event loop stood still for {loop.time() - due:.1f} s", flush=True)


async def main():
    options = arguments(__doc__).parse_args()
    endpoint = Endpoint(options.device, size=LENGTH * (SLOTS + 1))
    for slot in range(SLOTS):
        endpoint.receive(slot * LENGTH, LENGTH)
    # What waits for other hosts goes to a thread of its own, so that it does not stop the loop.
    with await asyncio.to_thread(meet, options) as stream:
        await asyncio.to_thread(endpoint.connect, stream)
        messages = Messages(endpoint)
        work = ask(messages, endpoint.qp.shift) if options.server else serve(messages)
        await asyncio.gather(tick(), work)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        pass
