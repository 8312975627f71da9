"""Tiers of stored KV, fastest first: device, host memory, local disk, object store, and whatever lies behind it."""
