# SPDX-License-Identifier: BSD-3-Clause
"""Names of what a software NIC counts."""

from __future__ import annotations

#: What a software NIC counts of congestion, as mlx5 names it: fields of `Link`.
NIC_COUNTERS = ("np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled", "rp_cnp_ignored")
#: What it counts of reliable connections' troubles, as mlx5 names it: keys of `Device.counters`.
DEVICE_COUNTERS = (
    "out_of_sequence",
    "duplicate_request",
    "out_of_buffer",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "implied_nak_seq_err",
    "req_transport_retries_exceeded",
    "req_rnr_retries_exceeded",
    "rx_icrc_encapsulated",
)
