//! A peer's session: version, compatibility, metadata, ready or failed.
