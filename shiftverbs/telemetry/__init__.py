# SPDX-License-Identifier: BSD-3-Clause
"""What one may see of a process from outside: QPs, NICs, exchanger; for `shiftverbs status` and for metrics.

Nothing here is on the data path. Whoever wants to know asks, and only then is anything read.

    totals.py     what is counted over the life of the process: written by failover, under the driver's lock
    snapshot.py   the state of this process as plain data
    publisher.py  sends it to those that connect to this process's socket
    reader.py     asks all processes of this host
    metrics.py    the same for Prometheus, on an HTTP port
"""
