"""Virtual machines with soft-RoCE devices: RDMA by the kernel's own software, for tests where there is no card."""
