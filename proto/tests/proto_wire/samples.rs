//! A message of every kind, with every field set.

use super::*;

pub(super) fn engine() -> EngineId {
    EngineId::new("engine-p").unwrap()
}

pub(super) fn request(name: &str) -> RequestId {
    RequestId::new(name).unwrap()
}

pub(super) const RANK: RankId = RankId { pp: 1, tp: 2 };
pub(super) const SHAPE: EngineShape = EngineShape { tp: 4, pp: 2, dcp: 1 };

pub(super) fn agent() -> AgentMetadata {
    AgentMetadata {
        name: "agent".into(),
        incarnation: Incarnation(0x0123_4567_89ab_cdef),
        ucx_version: "1.22.0".into(),
        address: vec![1, 2, 3],
        regions: vec![
            RegionMetadata {
                base: 0x7f00_0000_0000,
                len: 4096,
                kind: MemoryKind::Host,
                rkey: vec![4, 5],
                handle: None,
                is_scattered: false,
                is_filled_by_kernel: true,
            },
            RegionMetadata {
                base: 0x1000,
                len: 8192,
                kind: MemoryKind::Cuda { device: 3 },
                rkey: vec![],
                handle: Some(DeviceHandle { handle: vec![8; 64], offset: 512, pieces: vec![] }),
                is_scattered: false,
                is_filled_by_kernel: false,
            },
            RegionMetadata {
                base: 0x8000,
                len: 16384,
                kind: MemoryKind::Cuda { device: 1 },
                rkey: vec![9],
                handle: Some(DeviceHandle {
                    handle: vec![],
                    offset: 1024,
                    pieces: vec![
                        DevicePiece { fd: 17, len: 1 << 21, fabric: vec![] },
                        DevicePiece { fd: -1, len: 1 << 22, fabric: vec![3; 64] },
                    ],
                }),
                is_scattered: true,
                is_filled_by_kernel: false,
            },
        ],
        late_regions: vec![],
    }
}

/// An agent that has registered more regions in its life than there are positions.
pub(super) fn agent_with_late_regions() -> AgentMetadata {
    let late = |index, region: &RegionMetadata| LateRegion { index, region: region.clone() };
    let agent = agent();
    let late_regions = vec![late(65_536, &agent.regions[1]), late(1 << 31, &agent.regions[2])];
    AgentMetadata { regions: agent.regions[..1].to_vec(), late_regions, ..agent }
}

pub(super) fn region() -> AgentRegion {
    AgentRegion {
        incarnation: Incarnation(0x0123_4567_89ab_cdef),
        index: 7,
        region: RegionMetadata {
            base: 0x2000,
            len: 16,
            kind: MemoryKind::Host,
            rkey: vec![6, 7, 8],
            handle: None,
            is_scattered: false,
            is_filled_by_kernel: false,
        },
    }
}

pub(super) fn rank() -> RankMetadata {
    let group = Group::new;
    RankMetadata {
        engine: engine(),
        rank: RANK,
        shape: SHAPE,
        compat: vec![
            CompatField { name: "model".into(), value: "tiny".into(), informative: false },
            CompatField { name: "vllm".into(), value: "0.32".into(), informative: true },
        ],
        geometry: Geometry {
            groups: vec![
                group(GroupKind::Full, 16),
                group(GroupKind::SlidingWindow { window: 128 }, 16),
                group(GroupKind::Latent, 64),
                group(GroupKind::State, 1),
            ],
            areas: vec![Area {
                layer: "model.layers.0.self_attn.attn".into(),
                part: "kv".into(),
                group: 0,
                region: 1,
                offset: 64,
                num_blocks: 10,
                block_stride: 512,
                heads: 2,
                first_head: 4,
                total_heads: 8,
                head_stride: 256,
                tokens: 16,
                token_stride: 16,
                content: 16,
                ..Area::default()
            }],
        },
        agent: agent(),
    }
}

pub(super) fn remote(incarnation: Option<Incarnation>) -> Remote {
    Remote {
        engine: engine(),
        incarnation,
        request: request("p-1"),
        host: "10.0.0.1".into(),
        port: 5680,
        lease_ms: 30_000,
        lease_id: 6,
        shared: true,
    }
}

pub(super) fn step() -> StepMetadata {
    StepMetadata {
        grants: vec![Grant {
            request: request("g"),
            lease_ms: 30_000,
            lease_id: 4,
            name: Some(request("x-1")),
            history: false,
        }],
        dropped: vec![request("x")],
        holds: vec![Hold { request: request("h"), remote: remote(None) }],
        loads: vec![Load {
            awaits: true,
            request: request("l"),
            remote: remote(Some(Incarnation(7))),
            local_blocks: vec![vec![1, 2, 0x0403_0201].into(), Blocks::default()],
            remote_blocks: vec![vec![5, 6, 7].into(), Blocks::default()],
            tokens: (3, 40),
            remote_tokens: 41,
            null_block: Some(0),
            window_only: true,
            refused: Some("why".into()),
        }],
        releases: vec![Release { request: request("r"), remote: remote(None) }],
        aborts: vec![request("a")],
        engine: vec![Holding {
            rank: RANK,
            groups: vec![Group {
                token_ranks: 2,
                token_rank: 1,
                token_interleave: 4,
                ..Group::new(GroupKind::Full, 16)
            }],
            parts: vec![HeldPart { layer: "l.0".into(), part: "kv".into(), group: 0, first_head: 3, heads: 2 }],
        }],
    }
}

pub(super) fn report() -> WorkerReport {
    WorkerReport {
        rank: RANK,
        granted: vec![request("g")],
        finished_sending: vec![request("s")],
        finished_recving: vec![request("f"), request("r")],
        failed_recving: vec![RecvFailure {
            request: request("f"),
            cause: Cause::LeaseExpired,
            message: "why".into(),
            invalid_blocks: vec![8, 9].into(),
        }],
        records: vec![RecvRecord {
            request: request("r"),
            remote_request: request("p-1"),
            blocks: 2,
            bytes: 1024,
            operations: 3,
            queued_us: 4,
            first_us: 5,
            transfer_us: 5,
            confirm_us: 6,
            cause: None,
        }],
        stats: Stats {
            recvs: 1,
            recv_failures: BTreeMap::from([(Cause::LeaseExpired, 1)]),
            bytes: 1024,
            handshakes: 1,
            ..Stats::default()
        },
    }
}

pub(super) fn peer_messages() -> Vec<(&'static str, PeerMessage)> {
    let reader = || Reader { engine: engine(), incarnation: Incarnation(9), rank: RANK };
    vec![
        (
            "peer_heartbeat",
            PeerMessage::Heartbeat {
                requests: vec![request("a"), request("b")],
                leases: vec![6, 7],
                reader: Some(reader()),
            },
        ),
        (
            "peer_done",
            PeerMessage::Done {
                request: request("a"),
                lease_id: 6,
                reader: reader(),
                readers: 2,
                serial: 11,
                more: true,
            },
        ),
        ("peer_release", PeerMessage::Release { request: request("a"), lease_id: 6, reader: reader(), readers: 1 }),
        ("peer_verdict", PeerMessage::Verdict { request: request("a"), verdict: Verdict::Expired, serial: 11 }),
    ]
}

pub(super) fn handshake_requests() -> Vec<(&'static str, HandshakeRequest)> {
    vec![
        ("handshake_query", HandshakeRequest::Query { id: 1, engine: Some(engine()), ranks: vec![RANK] }),
        ("handshake_query_all", HandshakeRequest::Query { id: 2, engine: None, ranks: vec![] }),
        ("handshake_push", HandshakeRequest::Push { id: 3, expected: 8, metadata: ByteBuf::from(vec![1, 2]) }),
        (
            "handshake_await",
            HandshakeRequest::Await {
                id: 4,
                engine: engine(),
                requests: vec![request("x-1"), request("x-2")],
                from_tokens: vec![],
            },
        ),
        (
            "handshake_await_chunks",
            HandshakeRequest::Await {
                id: 4,
                engine: engine(),
                requests: vec![request("x-1"), request("x-2")],
                from_tokens: vec![256, 0],
            },
        ),
    ]
}

pub(super) fn handshake_replies() -> Vec<(&'static str, HandshakeReply)> {
    let ranks = vec![RankBlob { rank: RANK, metadata: ByteBuf::from(vec![1, 2]) }];
    let (id, message) = (1, "why".to_string());
    vec![
        (
            "handshake_ranks",
            HandshakeReply::Ranks { id, engine: engine(), incarnation: Incarnation(5), shape: SHAPE, ranks },
        ),
        ("handshake_pushed", HandshakeReply::Pushed { id, missing: 3 }),
        (
            "handshake_prefills",
            HandshakeReply::Prefills {
                id,
                engine: engine(),
                incarnation: Incarnation(5),
                ready: vec![Prefill {
                    request: request("x-1"),
                    blocks: vec![vec![5, 6, 7].into(), Blocks::default()],
                    tokens: 41,
                    lease_ms: 30_000,
                    lease_id: 6,
                }],
                gone: vec![request("x-2")],
                partial: vec![],
            },
        ),
        (
            "handshake_prefills_partial",
            HandshakeReply::Prefills {
                id,
                engine: engine(),
                incarnation: Incarnation(5),
                ready: vec![],
                gone: vec![],
                partial: vec![Prefill {
                    request: request("x-1"),
                    blocks: vec![vec![5, 6].into(), Blocks::default()],
                    tokens: 32,
                    lease_ms: 30_000,
                    lease_id: 6,
                }],
            },
        ),
        ("handshake_refused", HandshakeReply::Refused { id, code: RefusalCode::NotReady, message }),
    ]
}

pub(super) fn batch() -> ReportBatch {
    let mut batch = ReportBatch::from(report());
    batch.add(WorkerReport { rank: RankId { pp: 0, tp: 0 }, ..report() });
    batch
}

/// A step that loads these blocks.
pub(super) fn loading(local_blocks: Vec<Blocks>, remote_blocks: Vec<Blocks>) -> StepMetadata {
    let load = Load {
        awaits: false,
        request: request("l"),
        remote: remote(None),
        local_blocks,
        remote_blocks,
        tokens: (3, 40),
        remote_tokens: 41,
        null_block: Some(0),
        window_only: true,
        refused: None,
    };
    StepMetadata { loads: vec![load], ..StepMetadata::default() }
}
