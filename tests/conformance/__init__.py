# SPDX-License-Identifier: BSD-3-Clause
"""rdma-core's own tests as a conformance suite."""
