# SPDX-License-Identifier: BSD-3-Clause
"""A ping-pong whose own metrics and shiftverbs' are served to Prometheus on one port.

python metrics_endpoint.py --metrics 9400            one end
python metrics_endpoint.py --metrics 9401 SERVER     the other
"""

import time

import prometheus_client
from endpoint import Endpoint, arguments, meet

from shiftverbs import observe


def main():
    parser = arguments(__doc__)
    parser.add_argument("--metrics", type=int, required=True, help="TCP port of the metrics, on 127.0.0.1")
    options = parser.parse_args()

    registry = prometheus_client.CollectorRegistry()
    rounds = prometheus_client.Counter("pingpong_rounds", "Messages there and back", registry=registry)
    observe.register_prometheus(registry)  # before the first QP: earlier events are not counted
    prometheus_client.start_http_server(options.metrics, "127.0.0.1", registry=registry)

    endpoint = Endpoint(options.device)
    endpoint.receive(0, 64)
    with meet(options) as stream:
        endpoint.connect(stream)
        if not endpoint.qp.shift.wait_protected(30):
            print(f"not protected: {endpoint.qp.shift.why}", flush=True)
        print(f"running; metrics on http://127.0.0.1:{options.metrics}/metrics", flush=True)
        while True:
            endpoint.ping_pong(first=options.server is not None)
            rounds.inc()
            time.sleep(0.01)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
