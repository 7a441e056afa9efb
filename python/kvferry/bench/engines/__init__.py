"""What moves the bytes: one module per engine, all with the same two sides (`engine`)."""
