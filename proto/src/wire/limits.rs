//! Bounds on what is sent and on what is accepted. Sources and reasons are in `docs/protocol-leases.md`.

/// Most ranks of one engine.
pub const MAX_RANKS: u32 = 4096;
/// Longest handshake request that asks. 4096 ranks take 48 KiB.
pub const MAX_QUERY_BYTES: usize = 64 << 10;
/// Most prefills in one question about them.
pub const MAX_AWAITED: usize = 1024;
/// Longest encoded rank metadata.
pub const MAX_RANK_METADATA_BYTES: usize = 4 << 20;
/// Longest encoded agent metadata: a few ten thousand regions with rkeys of some hundred bytes.
pub const MAX_AGENT_METADATA_BYTES: usize = 16 << 20;
/// Longest encoded region of an agent. Device memory has an entry for each allocation behind it.
pub const MAX_AGENT_REGION_BYTES: usize = 1 << 20;
/// Longest handshake request of any kind: a push carries a rank's metadata.
pub const MAX_REQUEST_BYTES: usize = MAX_RANK_METADATA_BYTES + (64 << 10);
/// Longest handshake reply.
pub const MAX_REPLY_BYTES: usize = 64 << 20;
/// Longest message between workers.
pub const MAX_PEER_MESSAGE_BYTES: usize = 1 << 20;
/// Most requests in one heartbeat: with ids of 512 bytes they fit [`MAX_PEER_MESSAGE_BYTES`].
pub const MAX_HEARTBEAT_REQUESTS: usize = 1024;
/// Longest step metadata.
pub const MAX_STEP_BYTES: usize = 256 << 20;
/// Longest worker report, and longest batch of them.
pub const MAX_REPORT_BYTES: usize = 256 << 20;
/// Most block ids in one list. They take 16 MiB on the wire, and stand for 67 million tokens at 16 tokens a block.
pub const MAX_BLOCK_IDS: usize = 1 << 22;
/// Most regions of one agent at a time. Those with a lower index have a position in its metadata. An index is never
/// used twice, because a stale plan or a peer's old metadata would otherwise silently name other memory.
pub const MAX_REGIONS: usize = 65_536;
/// Most compatibility fields of one rank.
pub const MAX_COMPAT_FIELDS: usize = 256;
