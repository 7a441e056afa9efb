//! The wire format: fixed bytes per message kind, round trips, and everything that is not a message.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod samples;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use kvferry_proto::ErrorKind;
use kvferry_proto::geometry::{Area, Geometry, Group, GroupKind};
use kvferry_proto::plan::{self, HeldPart, Holding, RankPlan};
use kvferry_proto::stats::Stats;
use kvferry_proto::wire::limits::{MAX_BLOCK_IDS, MAX_REGIONS};
use kvferry_proto::wire::{
    self, AgentMetadata, AgentRegion, Blocks, Cause, CompatField, DeviceHandle, DevicePiece, EngineShape, Grant,
    HandshakeReply, HandshakeRequest, Hold, LateRegion, Load, MemoryKind, Message, PeerMessage, Prefill, RankBlob,
    RankMetadata, Reader, RecvFailure, RecvRecord, RefusalCode, RegionMetadata, Release, Remote, ReportBatch,
    StepMetadata, Verdict, Versions, WorkerReport,
};
use kvferry_proto::{EngineId, Incarnation, RankId, RequestId};
use proptest::prelude::*;
use serde::Serialize;
use serde_bytes::ByteBuf;

use samples::*;

/// Calls `$check(name, &message)` for a sample of every message kind and variant.
macro_rules! for_each_sample {
    ($check:ident) => {
        $check("agent_metadata", &agent());
        $check("agent_metadata_late_regions", &agent_with_late_regions());
        $check("agent_region", &region());
        $check("rank_metadata", &rank());
        $check("step", &step());
        $check("worker_report", &report());
        $check("report_batch", &batch());
        peer_messages().iter().for_each(|(name, m)| $check(name, m));
        handshake_requests().iter().for_each(|(name, m)| $check(name, m));
        handshake_replies().iter().for_each(|(name, m)| $check(name, m));
    };
}

#[test]
fn the_bytes_of_every_message_are_fixed() {
    /// The format is an interface between releases. A change that this finds needs another protocol version, unless old
    /// readers take the new bytes and new readers the old ones. With KVFERRY_BLESS set the files are written anew.
    fn check<T: Message + PartialEq + Debug>(name: &str, message: &T) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/golden/{name}.hex"));
        let found: String =
            message.to_bytes_in(wire::VERSION).unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
        if std::env::var_os("KVFERRY_BLESS").is_some() {
            std::fs::write(&path, format!("{found}\n")).unwrap();
        }
        let bytes = golden(&path);
        let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(found, text, "the bytes of {name} differ from {}", path.display());
        assert_eq!(&T::from_bytes(&bytes).unwrap(), message);
        // In the other versions that are spoken, only the number differs.
        let older = message.to_bytes_in(wire::OLDEST).unwrap();
        let differing: Vec<_> = older.iter().zip(&bytes).filter(|(a, b)| a != b).collect();
        assert_eq!((older.len(), differing), (bytes.len(), vec![(&(wire::OLDEST as u8), &(wire::VERSION as u8))]));
        assert_eq!(message.to_bytes().unwrap(), message.to_bytes_in(T::OLDEST).unwrap());
        assert_eq!(T::from_sender(&bytes).unwrap().1, Versions::OURS);
    }
    for_each_sample!(check);
}

fn golden(path: &Path) -> Vec<u8> {
    let text: String = std::fs::read_to_string(path).unwrap_or_default().split_whitespace().collect();
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

/// Any msgpack value.
#[derive(Debug, PartialEq)]
enum Tree {
    Map(BTreeMap<String, Tree>),
    List(Vec<Tree>),
    Leaf(String),
}

impl<'de> serde::Deserialize<'de> for Tree {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Tree, D::Error> {
        struct Any;
        impl<'de> serde::de::Visitor<'de> for Any {
            type Value = Tree;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("anything")
            }
            fn visit_bool<E>(self, v: bool) -> Result<Tree, E> {
                Ok(Tree::Leaf(v.to_string()))
            }
            fn visit_i64<E>(self, v: i64) -> Result<Tree, E> {
                Ok(Tree::Leaf(v.to_string()))
            }
            fn visit_u64<E>(self, v: u64) -> Result<Tree, E> {
                Ok(Tree::Leaf(v.to_string()))
            }
            fn visit_str<E>(self, v: &str) -> Result<Tree, E> {
                Ok(Tree::Leaf(format!("{v:?}")))
            }
            fn visit_bytes<E>(self, v: &[u8]) -> Result<Tree, E> {
                Ok(Tree::Leaf(format!("{v:x?}")))
            }
            fn visit_unit<E>(self) -> Result<Tree, E> {
                Ok(Tree::Leaf("nil".into()))
            }
            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Tree, A::Error> {
                let mut list = Vec::new();
                while let Some(item) = seq.next_element()? {
                    list.push(item);
                }
                Ok(Tree::List(list))
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Tree, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<Tree, Tree>()? {
                    entries.insert(format!("{key:?}"), value);
                }
                Ok(Tree::Map(entries))
            }
        }
        from.deserialize_any(Any)
    }
}

impl Tree {
    /// Refuses it unless all that `older` has is in it with the same value.
    fn check_holds(&self, older: &Tree, at: &str) {
        match (self, older) {
            (Tree::Map(new), Tree::Map(old)) => old.iter().for_each(|(key, value)| {
                let at = format!("{at}.{key}");
                new.get(key).unwrap_or_else(|| panic!("{at} is gone")).check_holds(value, &at);
            }),
            (Tree::List(new), Tree::List(old)) => {
                assert_eq!(new.len(), old.len(), "{at}");
                new.iter().zip(old).for_each(|(new, old)| new.check_holds(old, at));
            }
            _ => assert_eq!(self, older, "{at}"),
        }
    }
}

#[test]
fn messages_of_version_4_are_read_and_nothing_of_them_is_lost() {
    static READ: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    fn folder() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/version-4")
    }
    #[derive(serde::Deserialize)]
    struct Whole {
        body: Tree,
    }
    fn check<T: Message + Debug>(name: &str, _: &T) {
        let path = folder().join(format!("{name}.hex"));
        if !path.exists() {
            return;
        }
        let bytes = golden(&path);
        READ.lock().unwrap().insert(format!("{name}.hex"));
        if T::OLDEST == wire::VERSION {
            // It does not leave its engine.
            let error = T::from_bytes(&bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::VersionMismatch);
            for part in ["protocol version 4 arrived", "this build version 5", "need the same kvferry release"] {
                assert!(error.message().contains(part), "{name}: {error}");
            }
            return;
        }
        let (message, versions) = T::from_sender(&bytes).unwrap();
        assert_eq!(versions, Versions { oldest: 4, newest: 4 }, "{name}");
        let body = |bytes: &[u8]| rmp_serde::from_slice::<Whole>(bytes).unwrap().body;
        body(&message.to_bytes_in(wire::VERSION).unwrap()).check_holds(&body(&bytes), name);
    }
    for_each_sample!(check);
    let names = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(*READ.lock().unwrap(), names.collect());
}

#[test]
fn every_truncation_and_extension_is_an_error() {
    fn check<T: Message + Debug>(name: &str, message: &T) {
        let mut bytes = message.to_bytes().unwrap();
        for len in 0..bytes.len() {
            let error = T::from_bytes(&bytes[..len]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{name} cut to {len}");
            assert!(error.message().contains(T::KIND), "{error}");
        }
        bytes.push(0xc0);
        let error = T::from_bytes(&bytes).unwrap_err();
        assert!(error.message().contains("1 bytes follow"), "{name}: {error}");
    }
    for_each_sample!(check);
}

#[derive(Serialize)]
struct Envelope<T> {
    magic: &'static str,
    version: u16,
    kind: &'static str,
    body: T,
    signature: &'static str,
}

fn envelope<T: Serialize>(kind: &'static str, version: u16, body: T) -> Vec<u8> {
    rmp_serde::to_vec_named(&Envelope { magic: "kvferry", version, kind, body, signature: "of a later release" })
        .unwrap()
}

#[test]
fn fields_of_a_later_release_are_ignored_and_optional_ones_may_be_absent() {
    #[derive(Serialize)]
    struct Later {
        grants: Vec<Grant>,
        priorities: Vec<(String, BTreeMap<u32, Option<f64>>)>,
    }
    let later =
        Later { grants: step().grants, priorities: vec![("x".into(), BTreeMap::from([(1, None), (2, Some(0.5))]))] };
    let decoded = StepMetadata::from_bytes(&envelope("step", wire::VERSION, later)).unwrap();
    assert_eq!(decoded, StepMetadata { grants: step().grants, ..StepMetadata::default() });
    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    enum LaterPeer {
        Heartbeat { requests: Vec<RequestId>, load: f32 },
    }
    let later = LaterPeer::Heartbeat { requests: vec![request("a")], load: 0.25 };
    let decoded = PeerMessage::from_bytes(&envelope("peer_message", wire::VERSION, later)).unwrap();
    assert_eq!(decoded, PeerMessage::Heartbeat { requests: vec![request("a")], leases: vec![], reader: None });
}

/// One that knows no late regions finds those before them where it looks for them.
#[test]
fn late_regions_are_beside_those_that_every_release_reads() {
    #[derive(serde::Deserialize)]
    struct Older {
        incarnation: Incarnation,
        regions: Vec<RegionMetadata>,
    }
    let agent = agent_with_late_regions();
    let bytes = agent.to_bytes().unwrap();
    let (older, _) = wire::decode::<Older>(wire::kind::AGENT_METADATA, wire::OLDEST, &bytes, bytes.len()).unwrap();
    assert_eq!((older.incarnation, older.regions), (agent.incarnation, agent.regions.clone()));
    let indices: Vec<u32> = agent.indexed().map(|(index, _)| index).collect();
    assert_eq!(indices, [0, 65_536, 1 << 31]);
}

#[test]
fn late_regions_are_bounded_and_behind_all_others() {
    let with = |indices: &[u32]| {
        let mut agent = agent_with_late_regions();
        let region = agent.regions[0].clone();
        agent.late_regions = indices.iter().map(|index| LateRegion { index: *index, region: region.clone() }).collect();
        agent
    };
    let first = MAX_REGIONS as u32;
    for indices in [&[first][..], &[first, first + 1, u32::MAX]] {
        with(indices).check_regions().unwrap();
        with(indices).validate().unwrap();
    }
    for (indices, named) in [
        (&[first - 1, first][..], first - 1),
        (&[first, first], first),
        (&[first + 5, first + 9, first + 7], first + 7),
    ] {
        for error in [with(indices).check_regions().unwrap_err(), with(indices).validate().unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            assert!(error.message().contains(&format!("late region {named} ")), "{error}");
        }
    }
    let most: Vec<u32> = (first..2 * first).collect();
    assert_eq!(with(&most).check_regions().unwrap_err().kind(), ErrorKind::Exhausted);
    with(&most[1..]).check_regions().unwrap();
    // Regions that are gone do not count.
    let mut agent = with(&most);
    agent.regions = vec![RegionMetadata::unreachable(0); MAX_REGIONS];
    agent.check_regions().unwrap();
    agent.regions.push(RegionMetadata::unreachable(0));
    assert_eq!(agent.check_regions().unwrap_err().kind(), ErrorKind::Exhausted);
    let mut empty = with(&[first]);
    empty.late_regions[0].region.len = 0;
    let error = empty.validate().unwrap_err();
    assert!(error.kind() == ErrorKind::OutOfRange && error.message().contains("region 65536"), "{error}");
}

#[test]
fn another_version_is_named_before_the_body_is_looked_at() {
    // Between engines, and within one.
    for version in [3, 6] {
        let error = PeerMessage::from_bytes(&envelope("peer_message", version, "nothing like one")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::VersionMismatch);
        let expected = format!(
            "a peer_message message of protocol version {version} arrived; its sender speaks version {version}, this \
             build versions 4 to 5; "
        );
        assert!(error.message().starts_with(&expected) && error.message().contains("upgrade the older"), "{error}");
    }
    for version in [4, 6] {
        let error = StepMetadata::from_bytes(&envelope("step", version, "nothing like a step")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::VersionMismatch);
        assert!(error.message().contains("this build version 5; all processes of one engine need"), "{error}");
    }
    let error = StepMetadata::from_bytes(&envelope("step", wire::VERSION, "nothing like a step")).unwrap_err();
    assert!(error.kind() == ErrorKind::Corrupt && error.message().contains("damaged step message"), "{error}");
    let error = StepMetadata::from_bytes(&envelope("peer_message", wire::VERSION, step())).unwrap_err();
    assert!(error.message().contains("expected a step message, got a \"peer_message\" message"), "{error}");
}

#[test]
fn foreign_bytes_are_told_from_damaged_ones() {
    let foreign = [
        b"".to_vec(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        rmp_serde::to_vec_named(&step()).unwrap(),
        rmp_serde::to_vec_named(&BTreeMap::from([("magic", "nixl")])).unwrap(),
        rmp_serde::to_vec_named(&(b"get_meta_msg", 0, 0)).unwrap(),
    ];
    for bytes in foreign {
        let error = StepMetadata::from_bytes(&bytes).unwrap_err();
        assert!(error.kind() == ErrorKind::Corrupt && error.message().contains("not a kvferry message"), "{error}");
    }
    let error = wire::decode::<StepMetadata>("step", wire::VERSION, &[0; 11], 10).unwrap_err();
    assert!(error.kind() == ErrorKind::Exhausted && error.message().contains("11 bytes"), "{error}");
}

#[test]
fn hostile_lengths_and_depths_are_refused_at_once() {
    // Every length below announces about 4 GiB and is followed by nothing.
    let head = [
        &[0x84, 0xa5][..],
        b"magic",
        &[0xa7],
        b"kvferry",
        &[0xa7],
        b"version",
        &[wire::VERSION as u8, 0xa4],
        b"kind",
        &[0xa4],
        b"step",
        &[0xa4],
        b"body",
    ];
    let head = head.concat();
    for tail in [&[0xdd][..], &[0xdf], &[0xc6], &[0xdb], &[0xc9], &[0x81, 0xa5, b'l', b'o', b'a', b'd', b's', 0xdd]] {
        let bytes = [&head[..], tail, &[0xff, 0xff, 0xff, 0xf0]].concat();
        let error = StepMetadata::from_bytes(&bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{tail:x?}: {error}");
    }
    // Lists of the largest count that the bytes could hold, each of one byte: memory stays in proportion.
    let nils = [&head[..], &[0x81, 0xa5], b"loads", &[0xdd, 0, 0x80, 0, 0], &vec![0xc0; 1 << 23]].concat();
    assert_eq!(StepMetadata::from_bytes(&nils).unwrap_err().kind(), ErrorKind::Corrupt);
    for deep in [0x91, 0x81] {
        let bytes = [&head[..], &vec![deep; 1 << 20]].concat();
        let error = StepMetadata::from_bytes(&bytes).unwrap_err();
        assert!(error.message().contains("deeper than 32 levels"), "{error}");
    }
}

#[test]
fn block_lists_are_bounded_and_whole() {
    let load = |blocks: Blocks| loading(vec![blocks], vec![]);
    let most = load(vec![7; MAX_BLOCK_IDS].into());
    assert_eq!(StepMetadata::from_bytes(&most.to_bytes().unwrap()).unwrap(), most);
    let error = load(vec![7; MAX_BLOCK_IDS + 1].into()).to_bytes().unwrap_err();
    assert!(error.message().contains("4194305 ids is over the limit of 4194304"), "{error}");
    #[derive(Debug, Serialize, serde::Deserialize)]
    struct Raw {
        blocks: ByteBuf,
    }
    #[derive(Debug, serde::Deserialize)]
    struct Typed {
        #[allow(dead_code)]
        blocks: Blocks,
    }
    for (len, part) in [(7, "multiple of 4"), (MAX_BLOCK_IDS * 4 + 4, "over the limit")] {
        let bytes = rmp_serde::to_vec_named(&Raw { blocks: ByteBuf::from(vec![0; len]) }).unwrap();
        let error = rmp_serde::from_slice::<Typed>(&bytes).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let bytes = rmp_serde::to_vec_named(&BTreeMap::from([("blocks", "text")])).unwrap();
    let error = rmp_serde::from_slice::<Typed>(&bytes).unwrap_err().to_string();
    assert!(error.contains("32-bit words in one binary field"), "{error}");
}

#[test]
fn messages_over_their_kinds_limit_are_not_sent() {
    let requests = vec![request(&"x".repeat(512)); 3000];
    let error = PeerMessage::Heartbeat { requests, leases: vec![], reader: None }.to_bytes().unwrap_err();
    assert!(error.kind() == ErrorKind::Exhausted && error.message().contains("peer_message"), "{error}");
    // What one heartbeat may hold does fit.
    let requests = vec![request(&"x".repeat(512)); wire::limits::MAX_HEARTBEAT_REQUESTS];
    PeerMessage::Heartbeat { requests, leases: vec![], reader: None }.to_bytes().unwrap();
    // And so does a query for every rank of the largest engine.
    let ranks = (0..wire::limits::MAX_RANKS).map(|n| RankId { pp: n / 64, tp: 4000 + n % 64 }).collect();
    let query = HandshakeRequest::Query { id: u64::MAX, engine: Some(engine()), ranks };
    assert!(query.to_bytes().unwrap().len() <= wire::limits::MAX_QUERY_BYTES);
}

#[test]
fn ids_are_bounded() {
    for (text, good) in [("", false), ("x", true)] {
        assert_eq!(RequestId::new(text).is_ok(), good);
        assert_eq!(EngineId::new(text).is_ok(), good);
    }
    assert!(RequestId::new("x".repeat(512)).is_ok() && RequestId::new("x".repeat(513)).is_err());
    assert!(EngineId::new("x".repeat(256)).is_ok() && EngineId::new("x".repeat(257)).is_err());
    #[derive(Serialize)]
    struct Loose {
        aborts: Vec<String>,
    }
    let error = StepMetadata::from_bytes(&envelope("step", wire::VERSION, Loose { aborts: vec!["x".repeat(513)] }))
        .unwrap_err();
    assert!(error.message().contains("a request id must have 1 to 512 bytes, this one has 513"), "{error}");
}

/// Plans reads from and for a rank that came from outside: errors are fine, panics are not.
fn plan_with(metadata: &RankMetadata) {
    let here = Holding::new(RANK, &rank().geometry);
    let there = Holding::new(metadata.rank, &metadata.geometry);
    let _ = plan::check_ranks(&rank(), metadata);
    let _ = plan::check_ranks(metadata, &rank());
    for (local, consumer, remote, producer) in [(&rank(), &here, metadata, &there), (metadata, &there, &rank(), &here)]
    {
        let shares = plan::assign(local.rank, std::slice::from_ref(consumer), std::slice::from_ref(producer), 1);
        for share in shares.iter().flat_map(|shares| shares.values()) {
            let _ = RankPlan::new(local, remote, &share.cells);
        }
    }
}

/// Decodes `bytes` as every kind; whatever decodes must encode and decode again to itself.
fn try_all(bytes: &[u8]) {
    fn one<T: Message + PartialEq + Debug>(bytes: &[u8]) {
        if let Ok(message) = T::from_bytes(bytes) {
            let again = message.to_bytes().unwrap();
            assert_eq!(T::from_bytes(&again).unwrap(), message);
        }
    }
    one::<AgentMetadata>(bytes);
    one::<RankMetadata>(bytes);
    one::<HandshakeRequest>(bytes);
    one::<HandshakeReply>(bytes);
    one::<PeerMessage>(bytes);
    one::<StepMetadata>(bytes);
    one::<WorkerReport>(bytes);
    one::<ReportBatch>(bytes);
    if let Ok(metadata) = RankMetadata::from_bytes(bytes) {
        let _ = metadata.validate();
        plan_with(&metadata);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn damaged_messages_never_panic(
        which in 0usize..64,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        insert in prop::option::of((any::<prop::sample::Index>(), prop::collection::vec(any::<u8>(), 0..6))),
    ) {
        let mut all: Vec<Vec<u8>> = vec![];
        let mut add = |_: &str, bytes: Vec<u8>| all.push(bytes);
        add("", agent().to_bytes().unwrap());
        add("", rank().to_bytes().unwrap());
        add("", step().to_bytes().unwrap());
        add("", report().to_bytes().unwrap());
        add("", batch().to_bytes().unwrap());
        peer_messages().iter().for_each(|(name, m)| add(name, m.to_bytes().unwrap()));
        handshake_requests().iter().for_each(|(name, m)| add(name, m.to_bytes().unwrap()));
        handshake_replies().iter().for_each(|(name, m)| add(name, m.to_bytes().unwrap()));
        let mut bytes = all[which % all.len()].clone();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some((at, more)) = insert {
            let at = at.index(bytes.len());
            bytes.splice(at..at, more);
        }
        try_all(&bytes);
    }

    #[test]
    fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        try_all(&bytes);
    }

    #[test]
    fn blocks_survive_the_wire(ids in prop::collection::vec(any::<u32>(), 0..300)) {
        let step = loading(vec![ids.clone().into()], vec![ids.clone().into()]);
        let found = StepMetadata::from_bytes(&step.to_bytes().unwrap()).unwrap();
        prop_assert_eq!(found.loads[0].local_blocks[0].ids(), &ids[..]);
        prop_assert_eq!(found, step);
    }
}
