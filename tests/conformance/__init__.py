"""rdma-core's own tests as a conformance suite."""
