"""kvferry's plug-in beside NIXL's UCX backend, through stock NIXL's own API."""
