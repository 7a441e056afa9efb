//! Ranks with two KV-cache groups whose bytes tell request, lease, layer, block and offset.

use kvferry_proto::geometry::{Area, Geometry, Group, GroupKind};
use kvferry_proto::ids::{EngineId, Incarnation, RankId, RequestId};
use kvferry_proto::wire::{
    AgentMetadata, EngineShape, HandshakeReply, MemoryKind, Message, RankBlob, RankMetadata, RegionMetadata,
};
use kvferry_proto::worker::{SessionId, WorkerSettings};
use serde_bytes::ByteBuf;

pub const BLOCKS: u32 = 600;
pub const BLOCK_TOKENS: u32 = 2;
pub const WINDOW: u32 = 4;
pub const BLOCK_BYTES: usize = 8;
pub const SHAPE: EngineShape = EngineShape { tp: 1, pp: 1, dcp: 1 };
pub const RANK: RankId = RankId { pp: 0, tp: 0 };

pub fn engine(name: &str) -> EngineId {
    EngineId::new(name).unwrap()
}

/// An engine's usual settings.
pub fn settings() -> WorkerSettings {
    WorkerSettings {
        heartbeat_divisor: 6,
        handshake_timeout_ms: 30_000,
        transfer_timeout_ms: 120_000,
        verdict_timeout_ms: 10_000,
        early_message_ms: 30_000,
        tombstone_ms: 120_000,
        hold_timeout_ms: 3_600_000,
        await_timeout_ms: 600_000,
        chunk_tokens: 256,
        peer_ttl_ms: 600_000,
    }
}

pub fn request(name: impl AsRef<str>) -> RequestId {
    RequestId::new(name).unwrap()
}

pub fn groups() -> Vec<Group> {
    vec![
        Group::new(GroupKind::Full, BLOCK_TOKENS),
        Group::new(GroupKind::SlidingWindow { window: WINDOW }, BLOCK_TOKENS),
    ]
}

/// What the listener of these ranks' engine, in the life `incarnation`, answers a session.
pub fn reply(session: SessionId, incarnation: u64, ranks: &[RankMetadata]) -> HandshakeReply {
    let blob = |rank: &RankMetadata| RankBlob { rank: rank.rank, metadata: ByteBuf::from(rank.to_bytes().unwrap()) };
    HandshakeReply::Ranks {
        id: session.0,
        engine: ranks[0].engine.clone(),
        incarnation: Incarnation(incarnation),
        shape: ranks[0].shape,
        ranks: ranks.iter().map(blob).collect(),
    }
}

/// One region per group; block b of a region starts at `b * stride`.
pub fn metadata(engine: EngineId, agent: u64, stride: u64) -> RankMetadata {
    let len = u64::from(BLOCKS) * stride;
    let area = |layer: &str, group: u32| Area {
        layer: layer.into(),
        part: "kv".into(),
        group,
        region: group,
        offset: 0,
        num_blocks: BLOCKS,
        block_stride: stride,
        heads: 1,
        first_head: 0,
        total_heads: 1,
        head_stride: BLOCK_BYTES as u64,
        tokens: BLOCK_TOKENS,
        token_stride: BLOCK_BYTES as u64 / u64::from(BLOCK_TOKENS),
        content: BLOCK_BYTES as u64 / u64::from(BLOCK_TOKENS),
        ..Area::default()
    };
    let region = |i: u64| RegionMetadata {
        base: (i + 1) << 32,
        len,
        kind: MemoryKind::Host,
        rkey: vec![1, 2, 3, i as u8],
        handle: None,
        is_scattered: false,
        is_filled_by_kernel: false,
    };
    RankMetadata {
        engine,
        rank: RANK,
        shape: SHAPE,
        compat: vec![],
        geometry: Geometry { groups: groups(), areas: vec![area("layers.0", 0), area("layers.1", 1)] },
        agent: AgentMetadata {
            name: "simulated".into(),
            incarnation: Incarnation(agent),
            ucx_version: "1.22.0".into(),
            address: vec![9, 9, 9],
            regions: vec![region(0), region(1)],
            late_regions: vec![],
        },
    }
}

/// A rank's memory.
pub struct Memory {
    pub stride: usize,
    pub regions: [Vec<u8>; 2],
}

impl Memory {
    pub fn new(stride: usize) -> Self {
        Memory { stride, regions: [vec![0; BLOCKS as usize * stride], vec![0; BLOCKS as usize * stride]] }
    }

    pub fn block(&mut self, group: usize, block: u32) -> &mut [u8] {
        let at = block as usize * self.stride;
        &mut self.regions[group][at..at + BLOCK_BYTES]
    }
}

/// What a block of a request holds: differs per prefill, group, position and offset.
pub fn tag(prefill: u32, group: usize, position: usize) -> [u8; BLOCK_BYTES] {
    let p = prefill.to_le_bytes();
    [p[0], p[1], p[2], group as u8 + 1, position as u8, 0xA0, 0xA1, (p[0] ^ position as u8).wrapping_add(group as u8)]
}
