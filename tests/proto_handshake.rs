//! The handshake's two halves against each other and against everything that may come over the network.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::sync::Arc;

use kvferry::ErrorKind;
use kvferry::proto::geometry::{Area, Geometry, Group, GroupKind};
use kvferry::proto::handshake::{Directory, HandshakeFailure, HandshakeOutcome, Pushes, Session};
use kvferry::proto::wire::limits::{MAX_AWAITED, MAX_QUERY_BYTES, MAX_RANK_METADATA_BYTES, MAX_REQUEST_BYTES};
use kvferry::proto::wire::{
    self, AgentMetadata, Cause, CompatField, EngineShape, HandshakeReply, HandshakeRequest, MemoryKind, Message,
    Prefill, RankBlob, RankMetadata, RefusalCode, RegionMetadata, kind,
};
use kvferry::proto::{EngineId, Incarnation, RankId, RequestId};
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
            }],
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

/// A session of rank (1, 0) of engine `d` that wants the ranks `wanted` of `p`.
fn session(wanted: &[RankId]) -> Session {
    let local = Arc::new(metadata("d", RankId { pp: 1, tp: 0 }));
    Session::new(local, 42, engine("p"), Some(LIFE), wanted.to_vec())
}

fn ask(session: &Session, directory: &mut Directory) -> Result<HandshakeOutcome, HandshakeFailure> {
    session.judge_bytes(&directory.answer(&session.request().unwrap()))
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
    assert_eq!(session(&[]).id(), 42);
    let outcome = ask(&session(&[]), &mut directory).unwrap();
    assert_eq!((outcome.engine, outcome.incarnation, outcome.shape), (engine("p"), LIFE, SHAPE));
    assert_eq!(outcome.ranks, ranks().into_iter().map(|rank| metadata("p", rank)).collect::<Vec<_>>());
    let wanted = [RankId { pp: 1, tp: 0 }, RankId { pp: 0, tp: 1 }];
    let outcome = ask(&session(&wanted), &mut directory).unwrap();
    assert_eq!(outcome.ranks.iter().map(|m| m.rank).collect::<Vec<_>>(), wanted);
}

#[test]
fn the_reply_is_the_encoding_of_its_type_and_holds_a_rank_once() {
    let rank = RankId { pp: 1, tp: 0 };
    let reply = directory().answer(&session(&[rank, rank, rank]).request().unwrap());
    let blob = ByteBuf::from(metadata("p", rank).to_bytes().unwrap());
    let expected = HandshakeReply::Ranks {
        id: 42,
        engine: engine("p"),
        incarnation: LIFE,
        shape: SHAPE,
        ranks: vec![RankBlob { rank, metadata: blob }],
    };
    assert_eq!(reply, expected.to_bytes_in(wire::VERSION).unwrap());
    assert_eq!(session(&[rank, rank, rank]).judge_bytes(&reply).unwrap().ranks.len(), 1);
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
    assert!(ask(&session(&[]), &mut full).is_ok());
}

/// `message`, written in `version` by a side that speaks `speaks`; None for a build that does not tell.
fn sent_in(message: &HandshakeRequest, version: u16, speaks: Option<[u16; 2]>) -> Vec<u8> {
    #[derive(serde::Serialize)]
    struct Envelope<'a> {
        magic: &'a str,
        version: u16,
        #[serde(skip_serializing_if = "Option::is_none")]
        speaks: Option<[u16; 2]>,
        kind: &'a str,
        body: &'a HandshakeRequest,
    }
    let kind = kind::HANDSHAKE_REQUEST;
    rmp_serde::to_vec_named(&Envelope { magic: "kvferry", version, speaks, kind, body: message }).unwrap()
}

/// The version that a message is written in.
fn version_of(bytes: &[u8]) -> u16 {
    #[derive(serde::Deserialize)]
    struct Envelope {
        version: u16,
    }
    rmp_serde::from_slice::<Envelope>(bytes).unwrap().version
}

#[test]
fn two_neighbouring_versions_talk_in_the_newer_one_that_both_speak() {
    let query = || HandshakeRequest::Query { id: 42, engine: Some(engine("p")), ranks: vec![] };
    let name = || RequestId::new("x").unwrap();
    let await_ =
        || HandshakeRequest::Await { id: 42, engine: engine("p"), requests: vec![name()], from_tokens: vec![] };
    // What the client sends first is read by the oldest listener.
    assert_eq!(version_of(&session(&[]).request().unwrap()), wire::OLDEST);
    for (version, speaks, answered_in) in
        [(4, None, 4), (4, Some([3, 4]), 4), (4, Some([4, 5]), 5), (5, Some([4, 5]), 5), (5, Some([5, 6]), 5)]
    {
        let mut directory = directory();
        let reply = directory.answer(&sent_in(&query(), version, speaks));
        assert_eq!(version_of(&reply), answered_in, "{version}, {speaks:?}");
        assert_eq!(session(&[]).judge_bytes(&reply).unwrap().ranks.len(), 4);
        // Whoever reads it, ranks' metadata is encoded once.
        let HandshakeReply::Ranks { ranks, .. } = HandshakeReply::from_bytes(&reply).unwrap() else { panic!() };
        assert!(ranks.iter().all(|rank| version_of(&rank.metadata) == wire::OLDEST));
        // An answer that comes later, and a refusal.
        assert_eq!(directory.answer_to(b"x", &sent_in(&await_(), version, speaks)), None);
        directory.prefill_gone(name());
        assert_eq!(version_of(&directory.poll_answer().unwrap().1), answered_in);
        let wrong = HandshakeRequest::Query { id: 42, engine: Some(engine("q")), ranks: vec![] };
        assert_eq!(version_of(&directory.answer(&sent_in(&wrong, version, speaks))), answered_in);
    }
}

#[test]
fn versions_that_are_not_neighbours_are_refused_with_both_ranges() {
    let query = HandshakeRequest::Query { id: 42, engine: None, ranks: vec![] };
    for (version, speaks, theirs, answered_in) in [
        (3, None, "its sender speaks version 3,", 4),
        (3, Some([2, 3]), "its sender speaks versions 2 to 3,", 4),
        (6, Some([6, 7]), "its sender speaks versions 6 to 7,", 5),
        (0, None, "its sender speaks version 0,", 4),
    ] {
        let reply = directory().answer(&sent_in(&query, version, speaks));
        let (id, code, text) = refusal(&reply);
        assert_eq!((id, code, version_of(&reply)), (0, RefusalCode::Version, answered_in));
        says(&text, &[&format!("protocol version {version} arrived"), theirs, "this build versions 4 to 5"]);
        says(&text, &["upgrade the older side, one protocol version at a time", "docs/guide.md"]);
        // The reply of such a listener, and its refusal.
        let mut reply = directory().answer(&session(&[]).request().unwrap());
        let at = reply.windows(7).position(|w| w == b"version").unwrap() + 7;
        reply[at] = version as u8;
        let failure = session(&[]).judge_bytes(&reply).unwrap_err();
        assert_eq!(failure.cause, Cause::Incompatible);
        says(&failure.message, &["listener", "this build versions 4 to 5", "upgrade the older side"]);
        let refused = HandshakeReply::Refused { id: 0, code: RefusalCode::Version, message: text };
        let failure = session(&[]).judge(refused).unwrap_err();
        assert_eq!(failure.cause, Cause::Incompatible);
    }
}

#[test]
fn one_engine_is_of_one_release() {
    let rank = ranks()[0];
    let bytes = metadata("p", rank).to_bytes().unwrap();
    let at = bytes.windows(7).position(|w| w == b"\xa6speaks").unwrap();
    assert_eq!(bytes[at + 7..at + 10], [0x92, wire::OLDEST as u8, wire::VERSION as u8]);
    // As a build of version 4 writes it.
    let older = [&[0x84], &bytes[1..at], &bytes[at + 10..]].concat();
    assert_eq!(RankMetadata::from_bytes(&older).unwrap(), metadata("p", rank));
    let mut newer = bytes.clone();
    (newer[at + 8], newer[at + 9]) = (5, 6);
    for (other, speaks) in [(older, "version 4"), (newer, "versions 4 to 6")] {
        let mut directory = Directory::new(engine("p"), LIFE, SHAPE, Pushes::Refused).unwrap();
        let error = directory.offer(other).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Incompatible);
        says(error.message(), &[&format!("speaks protocol {speaks}, its scheduler side versions 4 to 5")]);
        says(error.message(), &["need the same kvferry release"]);
        assert_eq!(directory.missing(), 4);
    }
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
    let (asker, reply) = empty.poll_answer().unwrap();
    assert_eq!((asker, told(&reply)), (b"x".to_vec(), (0, 1)));
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
        let failure = ask(&session(&[]), &mut directory).unwrap_err();
        assert!(failure.cause == Cause::HandshakeFailed, "{failure:?}");
        says(&failure.message, &[&format!("{} of its 4 ranks", 4 - index)]);
        assert!(!directory.is_ready());
        // A repeated push is harmless.
        for _ in 0..2 {
            let reply = HandshakeReply::from_bytes(&directory.answer(&push(rank, 4))).unwrap();
            assert_eq!(reply, HandshakeReply::Pushed { id: 8, missing: 3 - index as u32 });
        }
    }
    assert!(directory.is_ready() && ask(&session(&[]), &mut directory).is_ok());
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
        let found = ask(&session(&[]), directory).unwrap();
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
    let failure = ask(&session(&[]), &mut directory).unwrap_err();
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

/// Serves `change`d metadata for every rank and asks for (1, 0).
fn judged(change: &dyn Fn(&mut RankMetadata)) -> Result<HandshakeOutcome, HandshakeFailure> {
    let rank = RankId { pp: 1, tp: 0 };
    let mut m = metadata("p", rank);
    change(&mut m);
    let blob = RankBlob { rank, metadata: ByteBuf::from(m.to_bytes().unwrap()) };
    session(&[rank]).judge(HandshakeReply::Ranks {
        id: 42,
        engine: engine("p"),
        incarnation: LIFE,
        shape: m.shape,
        ranks: vec![blob],
    })
}

#[test]
fn incompatible_engines_learn_which_field_differs_and_both_values() {
    let incompatible = |change: &dyn Fn(&mut RankMetadata), parts: &[&str]| {
        let failure = judged(change).unwrap_err();
        assert!(failure.cause == Cause::Incompatible, "{failure:?}");
        says(&failure.message, parts);
    };
    assert!(judged(&|_| ()).is_ok());
    // Order does not matter.
    assert!(judged(&|m| m.compat.reverse()).is_ok());
    incompatible(
        &|m| m.compat[0].value = "other".into(),
        &["engine p rank (pp 1, tp 0)", "\"model\" differs", "\"tiny\" here", "\"other\" there", "same model"],
    );
    incompatible(&|m| m.compat.truncate(1), &["\"cache_dtype\" differs", "\"float32\" here", "missing there"]);
    incompatible(
        &|m| m.compat.push(CompatField { name: "extra".into(), value: "x".into(), informative: true }),
        &["\"extra\" differs", "missing here", "\"x\" there"],
    );
    incompatible(&|m| m.geometry.areas[0].total_heads = 4, &["number of KV heads of the model", "2 here", "4 on"]);
    incompatible(&|m| m.geometry.areas[0].content = 32, &["bytes per token and head", "64 here", "32 on"]);
    incompatible(&|m| m.geometry.groups[0].kind = GroupKind::Latent, &["kind of cache", "full here", "latent on"]);
    let whole = |m: &mut RankMetadata| {
        m.geometry.groups[0].block_size = 32;
        (m.geometry.areas[0].tokens, m.geometry.areas[0].content) = (1, 1024);
    };
    incompatible(&whole, &["block size", "16 here", "32 on", "attention backend"]);
    // Shapes and block sizes may differ.
    assert!(judged(&|m| m.shape.tp = 4).is_ok());
    assert!(judged(&|m| (m.geometry.groups[0].block_size, m.geometry.areas[0].tokens) = (8, 8)).is_ok());
    incompatible(&|m| m.geometry.areas[0].part = "k".into(), &["layout", "kv here", "k on"]);
}

/// As [`judged`], with `local` in place of what this side states.
fn judged_by(
    local: &dyn Fn(&mut RankMetadata),
    remote: &dyn Fn(&mut RankMetadata),
) -> Result<HandshakeOutcome, HandshakeFailure> {
    let rank = RankId { pp: 1, tp: 0 };
    let (mut here, mut there) = (metadata("d", rank), metadata("p", rank));
    local(&mut here);
    remote(&mut there);
    let blob = RankBlob { rank, metadata: ByteBuf::from(there.to_bytes().unwrap()) };
    let session = Session::new(Arc::new(here), 42, engine("p"), Some(LIFE), vec![rank]);
    let shape = there.shape;
    session.judge(HandshakeReply::Ranks { id: 42, engine: engine("p"), incarnation: LIFE, shape, ranks: vec![blob] })
}

#[test]
fn formats_are_compared_by_layer_where_both_state_them() {
    let format = |text: &'static str| move |m: &mut RankMetadata| m.geometry.areas[0].format = text.into();
    assert!(judged_by(&format("bfloat16"), &format("bfloat16")).is_ok());
    let failure = judged_by(&format("bfloat16"), &format("float16 TRITON")).unwrap_err();
    assert_eq!(failure.cause, Cause::Incompatible);
    let parts = ["format of layer \"layers.1\"", "\"bfloat16\" here", "\"float16 TRITON\" on", "attention backend"];
    says(&failure.message, &parts);
    // An earlier release states none.
    assert!(judged_by(&format("bfloat16"), &|_| ()).is_ok());
    assert!(judged_by(&|_| (), &format("bfloat16")).is_ok());
}

#[test]
fn a_field_that_both_call_informative_is_told_and_not_compared() {
    let field = |value: &'static str, informative| {
        move |m: &mut RankMetadata| m.compat.push(CompatField { name: "vllm".into(), value: value.into(), informative })
    };
    assert_eq!(judged_by(&field("0.32", true), &field("0.32", true)).unwrap().notes, [""; 0]);
    let outcome = judged_by(&field("0.32", true), &field("0.33", true)).unwrap();
    assert_eq!(outcome.notes, ["vllm differs: \"0.32\" here, \"0.33\" there"]);
    // An earlier release leaves it at that one value.
    for (ours, theirs) in [(true, false), (false, true), (false, false)] {
        let failure = judged_by(&field("0.32", ours), &field("0.33", theirs)).unwrap_err();
        says(&failure.message, &["\"vllm\" differs", "\"0.32\" here", "\"0.33\" there", "same vllm"]);
    }
}

#[test]
fn heads_whose_copies_nobody_knows_need_equal_numbers_of_ranks() {
    let by_rank = |total: u32| {
        move |m: &mut RankMetadata| {
            let area = &mut m.geometry.areas[0];
            (area.total_heads, area.heads_by_rank) = (total, true);
        }
    };
    assert!(judged_by(&by_rank(2), &by_rank(2)).is_ok());
    assert!(judged_by(&|_| (), &by_rank(2)).is_ok());
    for (ours, theirs) in [(2, 4), (4, 2)] {
        let failure = judged_by(&by_rank(ours), &by_rank(theirs)).unwrap_err();
        assert_eq!(failure.cause, Cause::Incompatible);
        let shards = [format!("{ours} shards here"), format!("{theirs} on the other side")];
        says(&failure.message, &["layer \"layers.1\"", &shards[0], &shards[1], "same --tensor-parallel-size"]);
    }
}

#[test]
fn replies_that_do_not_answer_the_query_are_failures() {
    let rank = RankId { pp: 1, tp: 0 };
    let blob = |name: &str, rank: RankId, of: RankId| RankBlob {
        rank,
        metadata: ByteBuf::from(metadata(name, of).to_bytes().unwrap()),
    };
    let judge = |id: u64, name: &str, incarnation: Incarnation, ranks: Vec<RankBlob>| {
        session(&[rank])
            .judge(HandshakeReply::Ranks { id, engine: engine(name), incarnation, shape: SHAPE, ranks })
            .unwrap_err()
    };
    let mine = || vec![blob("p", rank, rank)];
    let failed = |failure: HandshakeFailure, cause: Cause, parts: &[&str]| {
        assert!(failure.cause == cause, "{failure:?}");
        says(&failure.message, parts);
    };
    let bad = Cause::HandshakeFailed;
    failed(judge(41, "p", LIFE, mine()), bad, &["query 42", "query 41"]);
    failed(judge(42, "q", LIFE, mine()), bad, &["\"p\" was expected", "\"q\" answered"]);
    failed(
        judge(42, "p", Incarnation(1), mine()),
        Cause::PeerDied,
        &["restarted since", "0000000000000abc expected", "0000000000000001 found", "prefill the request again"],
    );
    failed(judge(42, "p", LIFE, vec![]), bad, &["(pp 1, tp 0) was asked for"]);
    failed(judge(42, "p", LIFE, vec![mine().remove(0), mine().remove(0)]), bad, &["twice"]);
    failed(
        judge(42, "p", LIFE, vec![blob("p", rank, RankId { pp: 0, tp: 0 })]),
        bad,
        &["(pp 0, tp 0)", "as that of rank (pp 1, tp 0)"],
    );
    failed(judge(42, "p", LIFE, vec![blob("q", rank, rank)]), bad, &["of engine q"]);
    let damaged = vec![RankBlob { rank, metadata: ByteBuf::from(vec![1, 2, 3]) }];
    failed(judge(42, "p", LIFE, damaged), bad, &["not a kvferry message"]);
    let reply = HandshakeReply::Pushed { id: 42, missing: 0 };
    failed(session(&[]).judge(reply).unwrap_err(), bad, &["something else"]);
    let reply = HandshakeReply::Ranks { id: 42, engine: engine("p"), incarnation: LIFE, shape: SHAPE, ranks: mine() };
    failed(session(&[]).judge(reply).unwrap_err(), bad, &["has 4 ranks, its listener gave 1"]);
    failed(session(&[]).judge_bytes(b"\xc0").unwrap_err(), bad, &["engine p's listener", "not a kvferry message"]);
    let refused =
        |id, code| session(&[]).judge(HandshakeReply::Refused { id, code, message: "why".into() }).unwrap_err();
    failed(refused(42, RefusalCode::UnknownRank), bad, &["refused: why"]);
    failed(refused(0, RefusalCode::Malformed), bad, &["refused: why"]);
    failed(refused(0, RefusalCode::Version), Cause::Incompatible, &["refused: why"]);
    failed(refused(41, RefusalCode::UnknownRank), bad, &["query 41"]);
    failed(refused(42, RefusalCode::NotReady), bad, &["refused: why"]);
}

#[test]
fn a_refusal_for_a_reason_of_a_newer_release_is_still_a_refusal() {
    #[derive(serde::Serialize)]
    #[serde(rename_all = "snake_case")]
    enum Newer {
        Refused { id: u64, code: &'static str, message: &'static str, since: u32 },
    }
    let reply = Newer::Refused { id: 42, code: "overloaded", message: "come back later", since: 3 };
    let bytes = wire::encode(kind::HANDSHAKE_REPLY, wire::VERSION, &reply).unwrap();
    let failure = session(&[]).judge_bytes(&bytes).unwrap_err();
    says(&failure.message, &["come back later"]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn both_halves_survive_damaged_bytes(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut directory = directory();
        let session = session(&[]);
        let damage = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            for (at, value) in &changes {
                let at = at.index(bytes.len());
                bytes[at] = *value;
            }
            bytes
        };
        let request = session.request().unwrap();
        let reply = directory.answer(&damage(&request));
        prop_assert!(HandshakeReply::from_bytes(&reply).is_ok());
        let cut_request = &request[..cut.index(request.len())];
        prop_assert_eq!(refusal(&directory.answer(cut_request)).1, RefusalCode::Malformed);
        let good = directory.answer(&request);
        let _ = session.judge_bytes(&damage(&good));
        prop_assert!(session.judge_bytes(&good[..cut.index(good.len())]).is_err());
        prop_assert!(session.judge_bytes(&good).is_ok());
    }
}
