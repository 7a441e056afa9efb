"""Proxies of the field before real servers."""
