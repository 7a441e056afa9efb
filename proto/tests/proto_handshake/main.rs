//! The handshake's two halves against each other and against everything that may come over the network.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod judging;
mod versions;

use std::sync::Arc;

use kvferry_proto::ErrorKind;
use kvferry_proto::geometry::{Area, Geometry, Group, GroupKind};
use kvferry_proto::handshake::{Directory, HandshakeCheck, HandshakeFailure, HandshakeOutcome, Pushes};
use kvferry_proto::wire::limits::{MAX_AWAITED, MAX_QUERY_BYTES, MAX_RANK_METADATA_BYTES, MAX_REQUEST_BYTES};
use kvferry_proto::wire::{
    self, AgentMetadata, Cause, CompatField, EngineShape, HandshakeReply, HandshakeRequest, MemoryKind, Message,
    Prefill, RankBlob, RankMetadata, RefusalCode, RegionMetadata,
};
use kvferry_proto::{EngineId, Incarnation, RankId, RequestId};
use proptest::prelude::*;
use serde_bytes::ByteBuf;

const SHAPE: EngineShape = EngineShape { tp: 2, pp: 2, dcp: 1 };
const LIFE: Incarnation = Incarnation(0xabc);

fn engine(name: &str) -> EngineId {
    EngineId::new(name).unwrap()
}

fn ranks() -> Vec<RankId> {
    (0..2).flat_map(|pp| (0..2).map(move |tp| RankId { pp, tp })).collect()
}

fn metadata(name: &str, rank: RankId) -> RankMetadata {
    let field = |name: &str, value: &str| CompatField { name: name.into(), value: value.into(), informative: false };
    RankMetadata {
        engine: engine(name),
        rank,
        shape: SHAPE,
        compat: vec![field("model", "tiny"), field("cache_dtype", "float32")],
        geometry: Geometry {
            groups: vec![Group::new(GroupKind::Full, 16)],
            areas: vec![Area {
                layer: format!("layers.{}", rank.pp),
                part: "kv".into(),
                group: 0,
                region: 0,
                offset: 0,
                num_blocks: 4,
                block_stride: 1024,
                heads: 1,
                first_head: rank.tp,
                total_heads: 2,
                head_stride: 1024,
                tokens: 16,
                token_stride: 64,
                content: 64,
                ..Area::default()
            }],
        },
        agent: AgentMetadata {
            name: format!("{name}-{rank}"),
            incarnation: Incarnation(7),
            ucx_version: "1.22.0".into(),
            address: vec![9; 40],
            regions: vec![RegionMetadata {
                base: 1 << 40,
                len: 4096,
                kind: MemoryKind::Host,
                rkey: vec![3; 30],
                handle: None,
                is_scattered: false,
                is_filled_by_kernel: false,
            }],
            late_regions: vec![],
        },
    }
}

fn directory() -> Directory {
    let mut directory = Directory::new(engine("p"), LIFE, SHAPE, Pushes::Refused).unwrap();
    for rank in ranks() {
        assert_eq!(directory.offer(metadata("p", rank).to_bytes().unwrap()).unwrap(), rank);
    }
    directory
}

/// A query for these ranks of engine `p`, or for all.
fn query(ranks: &[RankId]) -> Vec<u8> {
    HandshakeRequest::Query { id: 42, engine: Some(engine("p")), ranks: ranks.to_vec() }.to_bytes().unwrap()
}

/// What rank (1, 0) of engine `d` makes of a reply of `p`.
fn judge(reply: HandshakeReply) -> Result<HandshakeOutcome, HandshakeFailure> {
    let local = Arc::new(metadata("d", RankId { pp: 1, tp: 0 }));
    HandshakeCheck::new(local, 42, engine("p"), Some(LIFE)).judge(reply)
}

fn ask(directory: &mut Directory) -> Result<HandshakeOutcome, HandshakeFailure> {
    judge(HandshakeReply::from_bytes(&directory.answer(&query(&[]))).unwrap())
}

fn refusal(reply: &[u8]) -> (u64, RefusalCode, String) {
    match HandshakeReply::from_bytes(reply).unwrap() {
        HandshakeReply::Refused { id, code, message } => (id, code, message),
        other => panic!("not a refusal: {other:?}"),
    }
}

fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

#[test]
fn all_ranks_or_some_come_in_one_reply() {
    let mut directory = directory();
    let outcome = ask(&mut directory).unwrap();
    assert_eq!((outcome.engine, outcome.incarnation, outcome.shape), (engine("p"), LIFE, SHAPE));
    assert_eq!(outcome.ranks, ranks().into_iter().map(|rank| metadata("p", rank)).collect::<Vec<_>>());
    let wanted = [RankId { pp: 1, tp: 0 }, RankId { pp: 0, tp: 1 }];
    let reply = HandshakeReply::from_bytes(&directory.answer(&query(&wanted))).unwrap();
    let HandshakeReply::Ranks { ranks, .. } = reply else { panic!("{reply:?}") };
    assert_eq!(ranks.iter().map(|blob| blob.rank).collect::<Vec<_>>(), wanted);
}

#[test]
fn the_reply_is_the_encoding_of_its_type_and_holds_a_rank_once() {
    let rank = RankId { pp: 1, tp: 0 };
    let reply = directory().answer(&query(&[rank, rank, rank]));
    let blob = ByteBuf::from(metadata("p", rank).to_bytes().unwrap());
    let expected = HandshakeReply::Ranks {
        id: 42,
        engine: engine("p"),
        incarnation: LIFE,
        shape: SHAPE,
        ranks: vec![RankBlob { rank, metadata: blob }],
    };
    assert_eq!(reply, expected.to_bytes_in(wire::VERSION).unwrap());
}

#[test]
fn the_listener_says_what_it_refuses() {
    let mut full = directory();
    let query = |engine: Option<EngineId>, ranks: Vec<RankId>| {
        HandshakeRequest::Query { id: 5, engine, ranks }.to_bytes().unwrap()
    };
    let (id, code, text) = refusal(&full.answer(&query(Some(engine("q")), vec![])));
    assert_eq!((id, code), (5, RefusalCode::WrongEngine));
    says(&text, &["\"q\" was asked for", "\"p\" listens", "kv_transfer_params"]);
    let (id, code, text) = refusal(&full.answer(&query(None, vec![RankId { pp: 2, tp: 0 }])));
    assert_eq!((id, code), (5, RefusalCode::UnknownRank));
    says(&text, &["(pp 2, tp 0)", "tp 2 x pp 2"]);
    let (id, code, text) = refusal(&full.answer(&query(None, vec![RankId { pp: 0, tp: 0 }; MAX_QUERY_BYTES / 6])));
    assert_eq!((id, code), (5, RefusalCode::Malformed));
    says(&text, &["over the limit of 65536"]);
    let (id, code, text) = refusal(&full.answer(b"hello"));
    assert_eq!((id, code), (0, RefusalCode::Malformed));
    says(&text, &["not a kvferry message", "handshake_request"]);
    assert_eq!(refusal(&full.answer(&[])).1, RefusalCode::Malformed);
    assert_eq!(refusal(&full.answer(&vec![0x91; MAX_REQUEST_BYTES])).1, RefusalCode::Malformed);
    says(&refusal(&full.answer(&vec![0; MAX_REQUEST_BYTES + 1])).2, &["over the limit"]);
    // A message of another kind.
    says(&refusal(&full.answer(&metadata("p", ranks()[0]).to_bytes().unwrap())).2, &["rank_metadata"]);
    // It still works.
    assert!(ask(&mut full).is_ok());
}

#[test]
fn who_awaits_prefills_is_refused_or_told_and_needs_no_ranks() {
    let mut empty = Directory::new(engine("p"), LIFE, SHAPE, Pushes::Refused).unwrap();
    let name = |name: String| RequestId::new(name).unwrap();
    let ask = |engine: EngineId, requests: Vec<RequestId>| {
        HandshakeRequest::Await { id: 5, engine, requests, from_tokens: vec![] }.to_bytes().unwrap()
    };
    let (id, code, text) = refusal(&empty.answer_to(b"x", &ask(engine("q"), vec![name("a".into())])).unwrap());
    assert_eq!((id, code), (5, RefusalCode::WrongEngine));
    says(&text, &["\"q\" was asked for", "\"p\" listens"]);
    let many: Vec<RequestId> = (0..=MAX_AWAITED).map(|n| name(n.to_string())).collect();
    let (id, code, text) = refusal(&empty.answer_to(b"x", &ask(engine("p"), many)).unwrap());
    assert_eq!((id, code), (5, RefusalCode::Malformed));
    says(&text, &["1025 prefills", "at most 1024"]);
    let long: Vec<RequestId> = (0..200).map(|n| name(format!("{n:0>500}"))).collect();
    let (id, code, text) = refusal(&empty.answer_to(b"x", &ask(engine("p"), long)).unwrap());
    assert_eq!((id, code), (5, RefusalCode::Malformed));
    says(&text, &["over the limit of 65536"]);
    // Who cannot wait is told that nothing is over; who can, when something is.
    let question = ask(engine("p"), vec![name("a".into())]);
    let told = |reply: &[u8]| match HandshakeReply::from_bytes(reply).unwrap() {
        HandshakeReply::Prefills { id: 5, incarnation: LIFE, ready, gone, .. } => (ready.len(), gone.len()),
        other => panic!("{other:?}"),
    };
    assert_eq!(told(&empty.answer(&question)), (0, 0));
    assert_eq!((empty.answer_to(b"x", &question), empty.poll_answer()), (None, None));
    empty.prefill_gone(name("a".into()));
    let (client, reply) = empty.poll_answer().unwrap();
    assert_eq!((client, told(&reply)), (b"x".to_vec(), (0, 1)));
    assert_eq!(told(&empty.answer(&question)), (0, 1));
}

#[test]
fn ranks_too_large_for_one_reply_are_refused_and_can_be_asked_for_apart() {
    let shape = EngineShape { tp: 20, pp: 1, dcp: 1 };
    let mut directory = Directory::new(engine("p"), LIFE, shape, Pushes::Refused).unwrap();
    for tp in 0..20 {
        let mut m = metadata("p", RankId { pp: 0, tp });
        (m.shape, m.geometry.areas[0].first_head) = (shape, 0);
        m.agent.regions[0].rkey = vec![1; MAX_RANK_METADATA_BYTES - 4096];
        directory.offer(m.to_bytes().unwrap()).unwrap();
    }
    let ask = |directory: &mut Directory, ranks: Vec<RankId>| {
        directory.answer(&HandshakeRequest::Query { id: 1, engine: None, ranks }.to_bytes().unwrap())
    };
    let (_, code, text) = refusal(&ask(&mut directory, vec![]));
    assert_eq!(code, RefusalCode::TooLarge);
    says(&text, &["20 ranks", "67108864", "fewer"]);
    let some = (0..8).map(|tp| RankId { pp: 0, tp }).collect();
    let reply = ask(&mut directory, some);
    assert!(
        matches!(HandshakeReply::from_bytes(&reply).unwrap(), HandshakeReply::Ranks { ranks, .. } if ranks.len() == 8)
    );
}

#[test]
fn a_query_before_all_ranks_are_there_may_be_tried_again() {
    let mut directory = Directory::new(engine("p"), LIFE, SHAPE, Pushes::Accepted).unwrap();
    let push = |rank: RankId, expected: u32| {
        let metadata = ByteBuf::from(metadata("p", rank).to_bytes().unwrap());
        HandshakeRequest::Push { id: 8, expected, metadata }.to_bytes().unwrap()
    };
    for (index, rank) in ranks().into_iter().enumerate() {
        let failure = ask(&mut directory).unwrap_err();
        assert!(failure.cause == Cause::HandshakeFailed, "{failure:?}");
        says(&failure.message, &[&format!("{} of its 4 ranks", 4 - index)]);
        assert!(!directory.is_ready());
        // A repeated push is harmless.
        for _ in 0..2 {
            let reply = HandshakeReply::from_bytes(&directory.answer(&push(rank, 4))).unwrap();
            assert_eq!(reply, HandshakeReply::Pushed { id: 8, missing: 3 - index as u32 });
        }
    }
    assert!(directory.is_ready() && ask(&mut directory).is_ok());
    let (id, code, text) = refusal(&directory.answer(&push(ranks()[0], 8)));
    assert_eq!((id, code), (8, RefusalCode::Push));
    says(&text, &["expects 8 ranks", "started for 4"]);
    let mut changed = metadata("p", ranks()[0]);
    changed.agent.incarnation = Incarnation(8);
    let changed = ByteBuf::from(changed.to_bytes().unwrap());
    let changed = HandshakeRequest::Push { id: 9, expected: 4, metadata: changed }.to_bytes().unwrap();
    says(&refusal(&directory.answer(&changed)).2, &["(pp 0, tp 0)", "other metadata before", "restarted"]);
    // Without pushes switched on.
    let mut closed = self::directory();
    says(&refusal(&closed.answer(&push(ranks()[0], 4))).2, &["takes no pushes"]);
}

#[test]
fn ranks_whose_workers_were_started_anew_are_served_as_they_are_now() {
    let mut directory = directory();
    let give = |change: &dyn Fn(&mut RankMetadata)| -> Vec<(RankId, Vec<u8>)> {
        let encode = |rank| {
            let mut m = metadata("p", rank);
            change(&mut m);
            (rank, m.to_bytes().unwrap())
        };
        ranks().into_iter().map(encode).collect()
    };
    let served = |directory: &mut Directory| {
        let found = ask(directory).unwrap();
        found.ranks.iter().map(|m| (m.agent.incarnation, m.agent.regions[0].base)).collect::<Vec<_>>()
    };
    let before = served(&mut directory);
    let next = Incarnation(LIFE.0 + 1);
    assert!(!directory.renew(give(&|_| ()), next).unwrap(), "nothing has changed");
    assert_eq!(directory.incarnation(), LIFE);
    let moved = |m: &mut RankMetadata| {
        m.agent.incarnation = Incarnation(8);
        m.agent.regions[0].base = 1 << 20;
    };
    let mut refused = |ranks, kind, parts: &[&str]| {
        let error = directory.renew(ranks, next).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        says(error.message(), parts);
        assert_eq!(served(&mut directory), before, "nothing has changed");
    };
    refused(give(&moved)[1..].to_vec(), ErrorKind::InvalidArgument, &["1 of the engine's 4 ranks"]);
    refused(give(&|m| m.engine = engine("q")), ErrorKind::Incompatible, &["\"q\""]);
    let other = |m: &mut RankMetadata| m.geometry.areas[0].layer = "layers.9".into();
    refused(give(&other), ErrorKind::Incompatible, &["other parts of the cache"]);
    let mut swapped = give(&moved);
    swapped[0].0 = ranks()[1];
    refused(swapped, ErrorKind::InvalidArgument, &["(pp 0, tp 1)", "(pp 0, tp 0)"]);
    let (request, blocks) = (RequestId::new("a").unwrap(), vec![]);
    directory.prefill_progressed(Prefill { request: request.clone(), blocks, tokens: 32, lease_ms: 9, lease_id: 3 });
    let follow = HandshakeRequest::Await { id: 2, engine: engine("p"), requests: vec![request], from_tokens: vec![1] };
    let far =
        |directory: &mut Directory| match HandshakeReply::from_bytes(&directory.answer(&follow.to_bytes().unwrap())) {
            Ok(HandshakeReply::Prefills { partial, .. }) => partial.len(),
            other => panic!("{other:?}"),
        };
    assert_eq!(far(&mut directory), 1);
    assert!(directory.renew(give(&moved), next).unwrap());
    assert_eq!(directory.incarnation(), next);
    assert_eq!(far(&mut directory), 0, "of blocks of the life before");
    // Who has params of the life before asks for blocks that are gone.
    let failure = ask(&mut directory).unwrap_err();
    assert_eq!(failure.cause, Cause::PeerDied);
    says(&failure.message, &["has restarted"]);
    let query = HandshakeRequest::Query { id: 3, engine: None, ranks: vec![] }.to_bytes().unwrap();
    let HandshakeReply::Ranks { incarnation, ranks, .. } =
        HandshakeReply::from_bytes(&directory.answer(&query)).unwrap()
    else {
        panic!("no ranks");
    };
    let now = ranks.iter().map(|blob| RankMetadata::from_bytes(&blob.metadata).unwrap().agent);
    assert_eq!(incarnation, next);
    assert!(now.into_iter().all(|agent| (agent.incarnation, agent.regions[0].base) == (Incarnation(8), 1 << 20)));
}

#[test]
fn offers_that_do_not_fit_are_refused() {
    let mut directory = Directory::new(engine("p"), LIFE, SHAPE, Pushes::Refused).unwrap();
    let mut refused = |metadata: Vec<u8>, kind: ErrorKind, parts: &[&str]| {
        let error = directory.offer(metadata).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        says(error.message(), parts);
        assert_eq!(directory.missing(), 4);
    };
    let rank = ranks()[3];
    let changed = |change: &dyn Fn(&mut RankMetadata)| {
        let mut m = metadata("p", rank);
        change(&mut m);
        m.to_bytes().unwrap()
    };
    refused(b"junk".to_vec(), ErrorKind::Corrupt, &["rank_metadata"]);
    refused(vec![0; MAX_RANK_METADATA_BYTES + 1], ErrorKind::Exhausted, &["limit"]);
    refused(changed(&|m| m.engine = engine("q")), ErrorKind::Incompatible, &["\"q\"", "\"p\"", "(pp 1, tp 1)"]);
    refused(changed(&|m| m.shape.tp = 4), ErrorKind::Incompatible, &["tp 4 x pp 2", "tp 2 x pp 2"]);
    refused(changed(&|m| m.rank.tp = 2), ErrorKind::InvalidArgument, &["(pp 1, tp 2)"]);
    refused(changed(&|m| m.geometry.areas[0].region = 3), ErrorKind::InvalidArgument, &["(pp 1, tp 1)", "region 3"]);
    refused(changed(&|m| m.compat.push(m.compat[0].clone())), ErrorKind::InvalidArgument, &["\"model\"", "twice"]);
    refused(changed(&|m| m.agent.regions[0].base = u64::MAX), ErrorKind::OutOfRange, &["region 0"]);
    for (shape, life) in [
        (EngineShape { tp: 0, ..SHAPE }, LIFE),
        (EngineShape { tp: 65, pp: 64, dcp: 1 }, LIFE),
        (SHAPE, Incarnation(0)),
    ] {
        assert!(Directory::new(engine("p"), life, shape, Pushes::Refused).is_err(), "{shape} {life}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn both_halves_survive_damaged_bytes(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut directory = directory();
        let damage = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            for (at, value) in &changes {
                let at = at.index(bytes.len());
                bytes[at] = *value;
            }
            bytes
        };
        let request = query(&[]);
        let reply = directory.answer(&damage(&request));
        prop_assert!(HandshakeReply::from_bytes(&reply).is_ok());
        let cut_request = &request[..cut.index(request.len())];
        prop_assert_eq!(refusal(&directory.answer(cut_request)).1, RefusalCode::Malformed);
        let good = directory.answer(&request);
        let _ = HandshakeReply::from_bytes(&damage(&good)).map(judge);
        prop_assert!(HandshakeReply::from_bytes(&good[..cut.index(good.len())]).is_err());
        prop_assert!(judge(HandshakeReply::from_bytes(&good).unwrap()).is_ok());
    }
}
